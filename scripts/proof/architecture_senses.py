"""Tiny models of pictures, sound and series, and of pictures beside captions."""

from __future__ import annotations

from typing import Any

from architecture_fields import DECODER, IMAGES, NO_DROPOUT, Architecture

__all__ = ["PICTURES_AND_SOUND"]

VISION: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "image_size": 32, "patch_size": 8, **NO_DROPOUT,
}  # fmt: skip
PICTURES: dict[str, Any] = {**VISION, "num_labels": 3}
SOUND: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 32, "apply_spec_augment": False,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "num_labels": 3,
}  # fmt: skip
PAIRS: dict[str, Any] = {
    "text_config": {**DECODER, "hidden_act": "gelu", "eos_token_id": 127, "projection_size": 64},
    "vision_config": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "image_size": 32, "patch_size": 8,
    },
}  # fmt: skip

PICTURES_AND_SOUND: dict[str, Architecture] = {
    "vit": Architecture(IMAGES, "vit", PICTURES, "images"),
    "convnext": Architecture(
        IMAGES,
        "convnext",
        {
            "patch_size": 4, "num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1],
            "drop_path_rate": 0.0, "num_labels": 3,
        },
        "images",
    ),
    "clip": Architecture(
        "CLIPModel", "clip", {**PAIRS, "projection_dim": 64}, "captions", {"return_loss": True}
    ),
    "dinov2": Architecture(
        IMAGES,
        "dinov2",
        {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2,
            "image_size": 32, "patch_size": 8, "num_labels": 3, **NO_DROPOUT,
        },
        "images",
    ),
    "segformer": Architecture(
        "SegformerForSemanticSegmentation",
        "segformer",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2],
            "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
            "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0, "num_labels": 3, **NO_DROPOUT,
        },
        "segmented images",
    ),
    "wav2vec2 cls": Architecture(
        "Wav2Vec2ForSequenceClassification", "wav2vec2", SOUND, "classified sound"
    ),
    "wav2vec2 ctc": Architecture("Wav2Vec2ForCTC", "wav2vec2", SOUND, "transcribed sound"),
    "deit": Architecture("DeiTForImageClassification", "deit", PICTURES, "images"),
    "beit": Architecture(IMAGES, "beit", {**PICTURES, "drop_path_rate": 0.0}, "images"),
    "swin": Architecture(
        IMAGES,
        "swin",
        {
            "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
            "num_heads": [2, 2], "window_size": 4, "drop_path_rate": 0.0, "num_labels": 3,
        },
        "images",
    ),
    "resnet": Architecture(
        IMAGES,
        "resnet",
        {
            "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
            "layer_type": "basic", "num_labels": 3,
        },
        "images",
    ),
    "mobilenet_v2": Architecture(
        IMAGES,
        "mobilenet_v2",
        {
            "image_size": 32, "depth_multiplier": 0.25, "classifier_dropout_prob": 0.0,
            "num_labels": 3,
        },
        "images",
    ),
    "efficientnet": Architecture(
        IMAGES,
        "efficientnet",
        {
            "image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.1,
            "hidden_dim": 320, "dropout_rate": 0.0, "drop_connect_rate": 0.0, "num_labels": 3,
        },
        "images",
    ),
    "ast": Architecture(
        "ASTForAudioClassification",
        "audio-spectrogram-transformer",
        {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, **NO_DROPOUT, "max_length": 32, "num_mel_bins": 16,
            "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "num_labels": 3,
        },
        "spectrograms",
    ),
    "hubert cls": Architecture(
        "HubertForSequenceClassification", "hubert", SOUND, "classified sound"
    ),
    "siglip": Architecture("SiglipModel", "siglip", PAIRS, "captions", {"return_loss": True}),
    "vit mae": Architecture(
        "ViTMAEForPreTraining",
        "vit_mae",
        {
            **VISION, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4, "decoder_intermediate_size": 64,
        },
        "hidden images",
    ),
    "patchtst": Architecture(
        "PatchTSTForPrediction",
        "patchtst",
        {
            "num_input_channels": 2, "context_length": 32, "prediction_length": 8,
            "patch_length": 8, "patch_stride": 8, "d_model": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "ffn_dim": 128, "loss": "mse", "attention_dropout": 0.0,
            "ff_dropout": 0.0, "positional_dropout": 0.0, "head_dropout": 0.0, "path_dropout": 0.0,
        },
        "series",
    ),
}  # fmt: skip
