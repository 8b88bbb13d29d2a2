"""Two small models, without and with LocAteR: trained, compared, drawn."""
