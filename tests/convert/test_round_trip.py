"""Hugging Face to Megatron and back: every byte of every file, and what other people's readers find in the middle."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.convert.exporter import export_checkpoint
from megatron_xorl.convert.importer import import_checkpoint
from megatron_xorl.convert.plan import Options
from megatron_xorl.convert.tiny import make_tiny
from megatron_xorl.convert.verify import verify
from megatron_xorl.fp8.format import dequantize_blocks, quantize_blocks
from megatron_xorl.weights.dcp_metadata import metadata_bytes, read_items
from megatron_xorl.weights.fingerprint import fingerprint
from megatron_xorl.weights.keys import key_table
from megatron_xorl.weights.manifest import read_manifest, write_manifest
from megatron_xorl.weights.megatron_checkpoint import MegatronCheckpoint
from megatron_xorl.weights.opening import open_checkpoint
from megatron_xorl.weights.reader import HfCheckpoint

PAIRS = [("tiny_dir", "fp8_megatron"), ("bf16_dir", "bf16_megatron")]


@pytest.fixture(params=PAIRS, ids=["fp8", "bf16"])
def pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    return tuple(request.getfixturevalue(name) for name in request.param)


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """What safetensors' own reader finds."""
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def test_every_file_comes_back_byte_for_byte(pair, tmp_path: Path) -> None:
    hf, megatron = pair
    export_checkpoint(megatron, tmp_path / "back")
    names = sorted(path.name for path in hf.iterdir())
    back = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert back == sorted([*names, "manifest.json"])
    for name in names:
        assert (hf / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), name


def test_torchs_own_reader_finds_every_tensor_under_its_key(pair) -> None:
    hf, megatron = pair
    wanted = all_tensors(hf)
    table = key_table(load_glm_config(hf))
    metadata = FileSystemReader(megatron).read_metadata().state_dict_metadata
    state = {k: torch.zeros(m.size, dtype=m.properties.dtype) for k, m in metadata.items()}
    dcp.load(state, storage_reader=FileSystemReader(megatron), no_dist=True)
    assert {chunk.key for chunk in table.values()} == state.keys()
    for name, chunk in table.items():
        cut = tuple(slice(o, o + s) for o, s in zip(chunk.offset, chunk.size, strict=True))
        assert same(state[chunk.key][cut].reshape(wanted[name].shape), wanted[name]), name


def test_the_reader_has_the_interface_and_the_bytes_of_the_other_form(pair) -> None:
    hf, megatron = (open_checkpoint(path) for path in pair)
    assert isinstance(megatron, MegatronCheckpoint)
    assert isinstance(hf, HfCheckpoint)
    config = load_glm_config(hf.directory)
    megatron.validate(config)
    assert megatron.names() == hf.names()
    for name in hf.names():
        assert (megatron.dtype(name), megatron.shape(name)) == (hf.dtype(name), hf.shape(name))
        assert same(megatron.read(name), hf.read(name)), name
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    part = (slice(32, 64), slice(0, 96))
    assert same(megatron.read(name, part), hf.read(name, part))
    assert fingerprint(config, megatron) == fingerprint(config, hf)


def loaded_by_transformers(directory: Path) -> tuple[list[str], set[str], torch.Tensor]:
    """What ``from_pretrained`` misses, what it does not expect, and fp32 logits of 48 tokens."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(IDS).logits
    return list(said["missing_keys"]), set(said["unexpected_keys"]), logits


IDS = torch.arange(48)[None]
"""Longer than ``index_topk``, so that the indexer chooses."""


def mtp_names(directory: Path) -> set[str]:
    """Tensors of layer 4, the MTP layer of the tiny model: transformers leaves out layer 78 alone, by number."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return {name for name in index["weight_map"] if name.startswith("model.layers.4.")}


def as_transformers_names(names: set[str]) -> set[str]:
    """The names after transformers has stacked the experts of a layer, which it does before it looks for a place."""
    banks = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
    return {
        re.sub(r"(\.experts)\.\d+\.(\w+)\.weight$", lambda m: f"{m[1]}.{banks[m[2]]}", name)
        for name in names
    }


def without_mtp(source: Path, out: Path) -> Path:
    """A copy of a checkpoint without its MTP layer."""
    shutil.copytree(source, out)
    dropped = mtp_names(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for shard in set(index["weight_map"].values()):
        tensors = {n: t for n, t in load_file(out / shard).items() if n not in dropped}
        (out / shard).unlink()
        if tensors:
            save_file(tensors, out / shard, metadata={"format": "pt"})
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if n not in dropped}
    left = sum(t.nbytes for t in all_tensors(out).values())
    index["metadata"]["total_size"] = left
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = json.loads((out / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    if quantization := raw.get("quantization_config"):
        kept = [n for n in quantization["modules_to_not_convert"] if "layers.4." not in n]
        quantization["modules_to_not_convert"] = kept
    (out / "config.json").write_text(json.dumps(raw))
    return out


def our_logits_on_bf16_values(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Our fp32 logits on the FP8 source: as it is, and with every weight's code x scale rounded to bf16 once."""
    from megatron_xorl.fp8.weight import FrozenWeight
    from megatron_xorl.training.model import forward_logits, load_model
    from tests.training.harness import use_one_process

    use_one_process()
    model = load_model(directory, dtype=torch.float32)
    plain = forward_logits(model, IDS).detach()
    for module in model.modules():
        if isinstance(module, FrozenWeight):
            rows, cols = (slice(0, side) for side in module.shape[-2:])
            banks = range(module.shape[0]) if len(module.shape) == 3 else [None]
            values = [module.tile(torch.float32, rows=rows, cols=cols, expert=e) for e in banks]
            module.set_dense(torch.stack(values).reshape(module.shape).bfloat16().float())
    return plain, forward_logits(model, IDS).detach()


def test_transformers_loads_the_bf16_export_completely_with_equal_logits(
    bf16_dir: Path, bf16_megatron: Path, tmp_path: Path
) -> None:
    export_checkpoint(bf16_megatron, tmp_path / "back")
    source, back = (loaded_by_transformers(path) for path in (bf16_dir, tmp_path / "back"))
    assert source[:2] == back[:2] == ([], as_transformers_names(mtp_names(bf16_dir)))
    assert torch.equal(source[2], back[2])
    assert source[2].std() > 0.1


@pytest.mark.parametrize("mtp", [True, False], ids=["mtp", "no_mtp"])
def test_transformers_loads_the_bf16_export_of_an_fp8_checkpoint_with_our_logits(
    mtp: bool, tiny_dir: Path, bf16_dir: Path, tmp_path: Path
) -> None:
    """Compared in fp32: transformers on the exported bf16 file, ours on the FP8 source with code x scale rounded to bf16.

    1e-5 is what two fp32 implementations of the layers agree within; the rounding to bf16 moves the logits by 1e-2.
    """
    source = tiny_dir if mtp else without_mtp(tiny_dir, tmp_path / "source")
    import_checkpoint(source, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "out", Options("bf16"))
    missing, unexpected, theirs = loaded_by_transformers(tmp_path / "out")
    assert (missing, unexpected) == (
        [],
        as_transformers_names(mtp_names(bf16_dir)) if mtp else set(),
    )
    unrounded, ours = our_logits_on_bf16_values(source)
    assert (ours - theirs).abs().max() <= 1e-5
    assert (unrounded - theirs).abs().max() > 1e-3
    assert theirs.std() > 0.1
    if not mtp:
        return
    name = "model.layers.2.mlp.shared_experts.down_proj.weight"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    shard = tmp_path / "out" / index["weight_map"][name]
    save_file(load_file(shard) | {name: -load_file(shard)[name]}, shard, metadata={"format": "pt"})
    wrong = loaded_by_transformers(tmp_path / "out")
    assert wrong[:2] == ([], as_transformers_names(mtp_names(bf16_dir)))
    assert (ours - wrong[2]).abs().max() > 1e-2


@pytest.mark.parametrize("direction", ["import", "export"])
@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_dequantising_is_the_fp32_product_rounded_once(
    direction: str, dtype: str, torch_dtype: torch.dtype, tiny_dir, fp8_megatron, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if direction == "export":
        export_checkpoint(fp8_megatron, out, Options(dtype))
        found = all_tensors(out)
    else:
        import_checkpoint(tiny_dir, out, Options(dtype))
        reader = MegatronCheckpoint(out)
        found = {name: reader.read(name) for name in reader.names()}
    source = all_tensors(tiny_dir)
    assert found.keys() == {name for name in source if not name.endswith("_scale_inv")}
    for name, value in found.items():
        scale = source.get(f"{name}_scale_inv")
        if scale is not None:
            wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
            wide = wide[: value.shape[0], : value.shape[1]]
            expected = (source[name].float() * wide).to(torch_dtype)
        elif name.endswith("e_score_correction_bias"):
            expected = source[name]
            assert value.dtype == torch.float32
        else:
            expected = source[name].to(torch_dtype)
        assert same(value, expected), name
    raw = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in raw
    assert load_glm_config(out).weight_block_size is None


def test_an_export_in_another_dtype_has_a_true_index_and_loads(
    fp8_megatron, tmp_path: Path
) -> None:
    export_checkpoint(fp8_megatron, tmp_path / "out", Options("bf16"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    tensors = all_tensors(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        with safe_open(str(tmp_path / "out" / file), framework="pt") as shard:
            assert name in shard.keys()  # noqa: SIM118 - safe_open is no mapping
    open_checkpoint(tmp_path / "out").validate(load_glm_config(tmp_path / "out"))


@pytest.mark.parametrize("direction", ["import", "export"])
def test_quantising_follows_the_format_and_only_where_it_quantises(
    direction: str, bf16_dir, bf16_megatron, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if direction == "export":
        export_checkpoint(bf16_megatron, out, Options(quantize=True))
    else:
        import_checkpoint(bf16_dir, out, Options(quantize=True))
    checkpoint, source = open_checkpoint(out), all_tensors(bf16_dir)
    config = load_glm_config(out)
    checkpoint.validate(config)
    assert config.weight_block_size == (128, 128)
    quantized = 0
    for name, value in source.items():
        if f"{name}_scale_inv" not in checkpoint:
            assert same(checkpoint.read(name), value), name
            continue
        quantized += 1
        codes, scales = quantize_blocks(value, (128, 128))
        assert same(checkpoint.read(name).view(torch.uint8), codes), name
        assert same(checkpoint.read(f"{name}_scale_inv"), scales), name
        error = dequantize_blocks(codes, scales, (128, 128)) - value.float()
        assert error.norm() / value.float().norm() < 0.04  # e4m3 has 3 mantissa bits: 2^-4 at most
    assert quantized == 142


def test_weight_and_scale_in_different_shards_convert(tiny_dir, tmp_path: Path) -> None:
    """Thirty-odd shards of 100 kB: most scales lie in another file than their weight."""
    hf = make_tiny(tmp_path / "hf", shard_bytes=100_000)
    reader = HfCheckpoint(hf)
    scales = [name for name in reader.names() if name.endswith("_scale_inv")]
    apart = [
        n for n in scales if reader.shard_of(n) != reader.shard_of(n.removesuffix("_scale_inv"))
    ]
    assert apart
    import_checkpoint(hf, tmp_path / "kept", workers=2)
    import_checkpoint(hf, tmp_path / "bf16", Options("bf16"), workers=2)
    export_checkpoint(tmp_path / "kept", tmp_path / "back", workers=2)
    for shard in reader.shards():
        assert (hf / shard).read_bytes() == (tmp_path / "back" / shard).read_bytes()
    import_checkpoint(tiny_dir, tmp_path / "other", Options("bf16"))
    for name in MegatronCheckpoint(tmp_path / "bf16").names():
        assert same(
            MegatronCheckpoint(tmp_path / "bf16").read(name),
            MegatronCheckpoint(tmp_path / "other").read(name),
        )


def test_a_single_file_without_index_comes_back_as_one(bf16_dir, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    shutil.copy(bf16_dir / "config.json", hf)
    save_file(all_tensors(bf16_dir), hf / "model.safetensors")
    import_checkpoint(hf, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]
    back = (tmp_path / "back/model.safetensors").read_bytes()
    assert back == (hf / "model.safetensors").read_bytes()


def test_norms_under_fused_names_are_read_as_the_norm_by_itself(fp8_megatron, tmp_path) -> None:
    """A checkpoint with Transformer Engine's spellings holds the same tensors; both spellings at once are refused."""
    renamed = tmp_path / "renamed"
    shutil.copytree(fp8_megatron, renamed)
    spellings = {
        "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    items, changed = [], 0
    for item in read_items(renamed / ".metadata"):
        for alone, fused in spellings.items():
            if item.key == f"decoder.layers.0.{alone}":
                item = item._replace(key=f"decoder.layers.0.{fused}")
                changed += 1
        items.append(item)
    assert changed == 3
    rewrite_metadata(renamed, items)
    assert MegatronCheckpoint(renamed).names() == MegatronCheckpoint(fp8_megatron).names()
    export_checkpoint(renamed, tmp_path / "back")
    again = next(item for item in items if item.key.endswith("linear_fc1.layer_norm_weight"))
    rewrite_metadata(
        renamed, [*items, again._replace(key="decoder.layers.0.pre_mlp_layernorm.weight")]
    )
    with pytest.raises(ValueError, match="keep one spelling"):
        MegatronCheckpoint(renamed)


def rewrite_metadata(directory: Path, items: list) -> None:
    content = metadata_bytes(items)
    (directory / ".metadata").write_bytes(content)
    document = read_manifest(directory)
    described = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    document["files"][".metadata"] = described
    write_manifest(directory, document)


@pytest.mark.parametrize("direction", ["import", "export"])
def test_a_shard_that_keeps_no_tensor_is_not_written(direction: str, tiny_dir, tmp_path) -> None:
    """Scales in a shard of their own: bf16 drops them, and a file without tensors is what our own reader refuses."""
    hf = tmp_path / "hf"
    shutil.copytree(tiny_dir, hf)
    tensors = all_tensors(tiny_dir)
    scales = {name: value for name, value in tensors.items() if name.endswith("_scale_inv")}
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    for shard in hf.glob("*.safetensors"):
        kept = {n: t for n, t in load_file(shard).items() if n not in scales}
        save_file(kept, shard, metadata={"format": "pt"})
    save_file(scales, hf / "model-scales.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(scales, "model-scales.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    first, then = (
        (Options("bf16"), Options()) if direction == "import" else (Options(), Options("bf16"))
    )
    import_checkpoint(hf, tmp_path / "megatron", first)
    export_checkpoint(tmp_path / "megatron", tmp_path / "out", then)
    assert not (tmp_path / "out/model-scales.safetensors").exists()
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards == sorted(path.name for path in tiny_dir.glob("*.safetensors"))
    assert verify(hf, tmp_path / "out", values=True)["equal"]
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    export_checkpoint(tmp_path / "again", tmp_path / "back")
    for name in shards:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_an_index_without_metadata_gets_the_total_that_transformers_asks_for(
    tiny_dir, tmp_path, caplog
) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(tiny_dir, hf)
    path = hf / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    total = index.pop("metadata")["total_size"]
    path.write_text(json.dumps(index))
    import_checkpoint(hf, tmp_path / "megatron")
    assert f"total_size nowhere, the tensors have {total} bytes" in caplog.text
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    back = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert back == {"metadata": {"total_size": total}, "weight_map": index["weight_map"]}
