import json

import pytest

from specmodel.errors import CalibrationError, UsageError
from specmodel.harness.shapes import check_tensor_parallel, read_draft, read_shape, shipped_names

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}


def written(tmp_path, config, name="model.json"):
    path = tmp_path / name
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("name", [n for n in shipped_names() if not n.startswith("EAGLE3")])
def test_shipped_targets_and_their_heads_belong_together(name):
    target = read_shape(name)
    head = read_draft(f"EAGLE3-{name}", target)
    assert head.kind == "eagle3"
    assert head.shape.num_layers == 1
    assert head.shape.hidden_size == target.hidden_size
    assert head.draft_vocab_size == 32000
    for world in (1, 2, 4):
        check_tensor_parallel(target, world)
        assert target.job_block(world)["vocab_size"] % (8 * world) == 0


def parameters(shape):
    """Weights of the whole model, the embedding counted apart from the LM head."""
    heads = (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    if shape.num_experts:
        mlp = shape.num_experts * (3 * shape.moe_intermediate_size + 1) * shape.hidden_size
    else:
        mlp = 3 * shape.intermediate_size * shape.hidden_size
    return shape.num_layers * (heads * shape.hidden_size + mlp) + 2 * shape.vocab_size * shape.hidden_size


@pytest.mark.parametrize(
    ("name", "published"), [("Llama-3.1-8B", 8.03e9), ("Llama-3.3-70B", 70.6e9), ("Qwen3-30B-A3B", 30.5e9)]
)
def test_shipped_sizes_add_up_to_the_published_parameter_counts(name, published):
    assert parameters(read_shape(name)) == pytest.approx(published, rel=0.005)


def test_head_dim_and_key_value_heads_have_their_defaults(tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    shape = read_shape(written(tmp_path, config))
    assert (shape.head_dim, shape.num_key_value_heads) == (128, 32)


def test_config_in_a_folder_is_named_after_the_folder(tmp_path):
    folder = tmp_path / "My-Model"
    folder.mkdir()
    written(folder, LLAMA, "config.json")
    assert read_shape(str(folder)).name == "My-Model"
    assert read_shape(str(folder / "config.json")).name == "My-Model"


def test_mixtral_keys_mean_what_qwen_keys_mean(tmp_path):
    shape = read_shape(written(tmp_path, MIXTRAL))
    assert (shape.num_experts, shape.experts_per_token, shape.moe_intermediate_size) == (8, 2, 14336)
    assert shape.norm_topk_prob
    qwen = {**MIXTRAL, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 14336}
    del qwen["num_local_experts"]
    other = read_shape(written(tmp_path, qwen, "q.json"))
    assert (other.num_experts, other.moe_intermediate_size, other.qk_norm) == (8, 14336, True)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"q_lora_rank": 1536}, "MLA"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"compression_config": {"format": "pack"}}, "number format"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"text_config": {}}, "multimodal"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"model_type": None}, "model_type"),
        ({"attn_logit_softcapping": 50.0}, "soft-capping"),
        ({"mlp_only_layers": [0]}, "mixed"),
        ({"first_k_dense_replace": 3}, "mixed"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"num_key_value_heads": 5}, "key-value"),
        ({"num_experts": 64}, "experts"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, changed, named):
    path = written(tmp_path, {**LLAMA, **changed})
    with pytest.raises(CalibrationError) as caught:
        read_shape(path)
    assert named in str(caught.value)
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize("key", [key for key in LLAMA if key not in ("model_type", "num_key_value_heads")])
@pytest.mark.parametrize("value", ["missing", 0, -1, 1.5, "8", True, None])
def test_every_size_must_be_a_whole_number(tmp_path, key, value):
    config = {k: v for k, v in LLAMA.items() if k != key}
    if value != "missing":
        config[key] = value
    with pytest.raises(CalibrationError, match=key):
        read_shape(written(tmp_path, config))


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "null"])
def test_a_file_that_is_no_config_is_a_calibration_error(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"broken\.json"):
        read_shape(str(path))


def test_unknown_names_list_the_shipped_ones():
    with pytest.raises(UsageError, match=r"Llama-3\.1-8B"):
        read_shape("GPT-9")


@pytest.mark.parametrize("layers", [0, 33, -1])
def test_layers_out_of_range(layers):
    with pytest.raises(UsageError, match="32 layers"):
        read_shape("Llama-3.1-8B", num_layers=layers)


def test_fewer_layers_are_said_in_the_name():
    assert read_shape("Llama-3.3-70B", num_layers=16).name == "Llama-3.3-70B, 16 of 80 layers"
    assert read_shape("Llama-3.3-70B", num_layers=80).name == "Llama-3.3-70B"


def test_speculators_form_of_a_head(tmp_path):
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32000,
        "transformer_layer_config": {**LLAMA, "num_hidden_layers": 1},
    }
    head = read_draft(written(tmp_path, config), read_shape("Llama-3.1-8B"))
    assert (head.kind, head.draft_vocab_size, head.shape.intermediate_size) == ("eagle3", 32000, 14336)


def test_a_head_of_another_target_is_refused():
    with pytest.raises(CalibrationError, match="hidden size 4096"):
        read_draft("EAGLE3-Llama-3.1-8B", read_shape("Qwen3-30B-A3B"))


def test_a_head_is_no_target_and_a_routed_model_no_drafter(tmp_path):
    with pytest.raises(CalibrationError, match="EAGLE-3 head"):
        read_shape("EAGLE3-Llama-3.1-8B")
    with pytest.raises(CalibrationError, match="routed"):
        read_draft(written(tmp_path, MIXTRAL), read_shape("Llama-3.1-8B"))
    with pytest.raises(CalibrationError, match="one layer"):
        read_draft(written(tmp_path, {**LLAMA, "draft_vocab_size": 32000}), read_shape("Llama-3.1-8B"))


def test_a_small_model_drafts_for_a_large_one(tmp_path):
    small = {**LLAMA, "hidden_size": 2048, "head_dim": 64, "intermediate_size": 8192, "num_hidden_layers": 16}
    draft = read_draft(written(tmp_path, small), read_shape("Llama-3.3-70B"))
    block = draft.job_block(2, "one")
    assert (draft.kind, block["hidden_size"], block["first_step_rows"]) == ("model", 2048, "one")
    assert not [key for key in block if "expert" in key]
    assert "draft_vocab_size" not in block


@pytest.mark.parametrize(("world", "fits"), [(1, True), (2, True), (8, True), (16, True), (3, False), (64, False)])
def test_what_gpus_can_share(world, fits):
    shape = read_shape("Llama-3.1-8B")
    if fits:
        check_tensor_parallel(shape, world)
    else:
        with pytest.raises(UsageError, match="Llama"):
            check_tensor_parallel(shape, world)


def test_slices_of_experts_must_stay_whole_tiles():
    check_tensor_parallel(read_shape("Qwen3-30B-A3B"), 4)
    with pytest.raises(UsageError, match="moe_intermediate_size"):
        check_tensor_parallel(read_shape("Qwen3-30B-A3B"), 8)
