from functools import partial

import torch

from .base import TOKENS, Case


def pixels(config):
    vision = getattr(config, "vision_config", config)
    return {"pixel_values": torch.randn(2, vision.num_channels, vision.image_size, vision.image_size)}


def words_and_pixels(config):
    return pixels(config) | {"input_ids": torch.randint(3, 90, (2, TOKENS))}


def dinov2_names(name):
    """From the names of the files to those of the modules, which newer transformers rename on saving."""
    for old, new in {
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
    }.items():
        name = name.replace(old, new)
    return name


def vit_names(name):
    return dinov2_names(name).replace("encoder.layer.", "layers.")


IMAGE = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
IMAGE |= dict(image_size=16, patch_size=4)
TEXT = dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
TEXT |= dict(max_position_embeddings=16, projection_size=48)
# Published configs leave out what equals the default: heads and layers here.
SPARSE_IMAGE = dict(hidden_size=48, intermediate_size=64, image_size=16, patch_size=4)
SPARSE_TEXT = dict(vocab_size=99, hidden_size=48, intermediate_size=64, max_position_embeddings=16, projection_size=48)
BOTH = dict(text_config=TEXT, vision_config=IMAGE)
SPARSE = dict(text_config=SPARSE_TEXT, vision_config=SPARSE_IMAGE)
LEFT_OUT = "PARTIAL: the attention of the pooling head, which has one learned query, left out"

vision = partial(Case, inputs=pixels)
vit = partial(vision, module=vit_names)
dinov2 = partial(vision, module=dinov2_names)

CASES = [
    vit("vit", "ViTConfig", "ViTForImageClassification", IMAGE),
    vit("vit-base-class", "ViTConfig", "ViTModel", IMAGE | dict(qkv_bias=False)),
    vit("deit", "DeiTConfig", "DeiTForImageClassificationWithTeacher", IMAGE),
    dinov2("dinov2", "Dinov2Config", "Dinov2Model", IMAGE),
    dinov2("dinov2-head", "Dinov2Config", "Dinov2ForImageClassification", IMAGE | dict(qkv_bias=False)),
    dinov2("dinov2-registers", "Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", IMAGE),
    Case("clip", "CLIPConfig", "CLIPModel", BOTH, words_and_pixels),
    Case("clip-text", "CLIPTextConfig", "CLIPTextModel", TEXT),
    Case("clip-text-projection", "CLIPTextConfig", "CLIPTextModelWithProjection", TEXT),
    vision("clip-vision", "CLIPVisionConfig", "CLIPVisionModel", IMAGE),
    Case("siglip", "SiglipConfig", "SiglipModel", BOTH, words_and_pixels, LEFT_OUT),
    Case("clip-sparse", "CLIPConfig", "CLIPModel", SPARSE, words_and_pixels, as_given=True),
    Case("siglip-sparse", "SiglipConfig", "SiglipModel", SPARSE, words_and_pixels, LEFT_OUT, as_given=True),
    Case("siglip-text", "SiglipTextConfig", "SiglipTextModel", TEXT),
    vision("siglip-vision", "SiglipVisionConfig", "SiglipVisionModel", IMAGE, coverage=LEFT_OUT),
    vision("siglip-vision-headless", "SiglipVisionConfig", "SiglipVisionModel", IMAGE | dict(vision_use_head=False)),
]
