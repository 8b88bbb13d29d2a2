"""Other methods against unstable attention, each under LocAteR's interface: one method per file."""
