"""Model folders whose linear layers are stored as codes: read, and written by ``weft quantize``.

What is written is compressed-tensors' format, which vLLM and Transformers read too; read are besides it AWQ, GPTQ without
reordered columns, and FP8 with scales of tensors, rows or blocks of 128. Layouts as their packages define them:

- compressed-tensors (compressors/pack_quantized): ``weight_packed`` int32, codes plus 2^(bits - 1) along K from the lowest bit
  on, ``weight_scale``, ``weight_zero_point`` packed along N; or ``weight`` of float8_e4m3fn or int8 with ``weight_scale``;
- AWQ (AutoAWQ, awq/modules/linear/gemm.py): ``qweight`` int32 [K, N / 8], ``qzeros`` [G, N / 8], nibbles of the columns
  0 2 4 6 1 3 5 7, ``scales`` [G, N];
- GPTQ (AutoGPTQ, auto_gptq/nn_modules/qlinear): ``qweight`` int32 [K / 8, N], ``qzeros`` [G, N / 8] of the zero point less 1
  (the zero point itself in ``gptq_v2``), ``scales`` [G, N], ``g_idx``;
- FP8 (DeepSeek V3, Qwen 3): ``weight`` float8_e4m3fn with ``weight_scale_inv`` [N / 128, K / 128].
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.inference.checkpoint import Folder, finite
from weft.inference.quantized import Codes, Quantized, Scheme
from weft.operators.low_precision.quantized_weight import GROUPS, pack_int4

# N outputs, K inputs, G groups of a row
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the nibble of each of eight columns lies
BLOCK = 128
SCALES = (torch.float32, torch.float16, torch.bfloat16)
SHARD = 4 * 2**30  # bytes of a file that is written


class QuantizedFolder(Folder):
    """A :class:`~weft.inference.checkpoint.Source` whose linear layers are codes.

    Raises:
        ValueError: a method, format or option that is not read; the message names it.
    """

    def __init__(self, folder: str | Path, quantization: dict[str, Any]):
        super().__init__(folder)
        self.settings = quantization
        method = str(quantization.get("quant_method"))
        checks = {
            "compressed-tensors": self._compressed,
            "awq": self._awq,
            "gptq": self._gptq,
            "gptq_v2": self._gptq,
            "fp8": self._fp8,
        }
        if method not in checks:
            raise ValueError(
                f"{folder}: weights are quantised by {method!r}; expected {', '.join(checks)}, or float weights"
            )
        self.method = method
        self.schemes: list[dict[str, Any]] = []  # of compressed-tensors' config.json
        checks[method]()

    # ---- settings ------------------------------------------------------------------------------------------------

    def _expect(self, name: str, found: Any, *expected: Any) -> None:
        if found not in expected:
            raise ValueError(
                f"{self.where}: {self.method} with {name} = {found!r:.60}; expected {' or '.join(map(repr, expected))}"
            )

    def _awq(self) -> None:
        self._expect("bits", self.settings.get("bits", self.settings.get("w_bit")), 4)
        self._expect("version", str(self.settings.get("version", "gemm")).lower(), "gemm")

    def _gptq(self) -> None:
        self._expect("bits", self.settings.get("bits"), 4)
        self._expect("desc_act", self.settings.get("desc_act", False), False)
        if self.settings.get("checkpoint_format") == "gptq_v2":
            self.method = "gptq_v2"

    def _fp8(self) -> None:
        self._expect("fmt", self.settings.get("fmt", "e4m3"), "e4m3")
        self._expect("weight_block_size", self.settings.get("weight_block_size"), None, [BLOCK, BLOCK])

    def _compressed(self) -> None:
        groups = self.settings.get("config_groups")
        if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
            raise ValueError(f"{self.where}: compressed-tensors without config_groups")
        for group in groups.values():
            weights = group.get("weights") or {}
            kind, bits = weights.get("type"), weights.get("num_bits")
            self._expect("weights (type, num_bits)", (kind, bits), ("int", 4), ("int", 8), ("float", 8))
            self._expect("strategy", weights.get("strategy"), "tensor", "channel", "group", "block")
            self._expect("actorder", weights.get("actorder"), None, "static", "weight")
            format = group.get("format") or self.settings.get("format")
            self._expect("format", format, "pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
            if weights["strategy"] == "block":
                self._expect("block_structure", weights.get("block_structure"), None, [BLOCK, BLOCK])
            if weights["strategy"] == "group" and (type(size := weights.get("group_size")) is not int or size < 1):
                raise ValueError(f"{self.where}: compressed-tensors with group_size = {size!r:.60}; expected columns")
            self.schemes.append(weights)
        self._expect("sparsity", (self.settings.get("sparsity_config") or {}).get("format", "dense"), "dense")
        self._expect("kv_cache_scheme", self.settings.get("kv_cache_scheme"), None)
        self._expect("transform_config", self.settings.get("transform_config") or None, None)

    # ---- layers --------------------------------------------------------------------------------------------------

    def linear(
        self, load: Any, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool, split: int | None = 0
    ) -> Quantized | None:
        """One layer of several matrices; None where they are not stored as codes."""
        stored = [self.codes_of(name) for name in names]
        if all(found is None for found in stored):
            return None
        for name, codes in zip(names, stored, strict=True):
            if codes is None:
                raise ValueError(f"{self.where}: {name} is not quantised, but others that it is computed with are")
        return layer_of(
            load, self.where, [codes for codes in stored if codes is not None], names, rows, columns, bias, split
        )

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        layer, stored = name.removesuffix(".weight"), self._find(name)
        packed = f"{layer}.qweight" in self or f"{layer}.weight_packed" in self
        if packed or (stored is not None and self.load(stored).dtype in (torch.float8_e4m3fn, torch.int8)):
            raise ValueError(
                f"{self.where}: {layer} is quantised; expected that of attention, dense feed-forward layers and the head "
                "alone, and floats elsewhere"
            )
        return super().tensor(name, shape)

    def codes_of(self, name: str) -> Codes | None:
        """Of a layer; None if it is not stored as codes."""
        if self.method == "compressed-tensors":
            return self._read_packed(name) if f"{name}.weight_packed" in self else self._read_plain(name)
        if self.method == "fp8":
            return self._read_plain(name)
        return self._read_columns(name) if f"{name}.qweight" in self else None

    def _take(self, name: str) -> Tensor:
        found = self._find(name)
        if found is None:
            raise ValueError(f"{self.where} has no tensor {name!r}, which {self.method} needs")
        self.read.add(found)
        return self.load(found)

    def _matrix(self, name: str, *dtypes: torch.dtype) -> Tensor:
        """A tensor of two dimensions that are not 0, of one of the dtypes."""
        t = self._take(name)
        if t.ndim != 2 or not t.numel() or t.dtype not in dtypes:
            raise ValueError(
                f"{self.where}: {name!r} is {t.dtype} {tuple(t.shape)}; expected a matrix of {' or '.join(map(str, dtypes))}"
            )
        return t

    def _scale(self, name: str) -> Tensor:
        t = self._take(name)
        if t.ndim > 2 or not t.numel() or not t.is_floating_point() or t.dtype == torch.float64:
            raise ValueError(f"{self.where}: {name!r} is {t.dtype} {tuple(t.shape)}; expected floats, [N] or [N, G]")
        return t

    def _as_asked(self, name: str, scale: Tensor, n: int, k: int) -> None:
        """Refuses scales of a weight [n, k] that are not what config.json asks for."""
        asked = []
        for scheme in self.schemes:
            strategy = scheme["strategy"]
            size = scheme["group_size"] if strategy == "group" else k
            shapes_of: dict[str, list[tuple[int, ...]]] = {
                "tensor": [(), (1,), (1, 1)], "channel": [(n,), (n, 1)], "block": [(-(-n // BLOCK), -(-k // BLOCK))],
                "group": [(n, -(-k // size))],
            }  # fmt: skip
            if scale.shape in (shapes := shapes_of[strategy]):
                return
            asked.append(f"{shapes[-1]}: {strategy!r}{f' of {size} columns' if strategy == 'group' else ''}")
        if asked:
            raise ValueError(
                f"{self.where}: {name!r} has shape {tuple(scale.shape)}, of a weight {(n, k)}; config.json asks for "
                f"{' or '.join(dict.fromkeys(asked))}"
            )

    def _optional(self, name: str) -> Tensor | None:
        return self._take(name) if name in self else None

    def _read_packed(self, name: str) -> Codes:
        packed = self._matrix(f"{name}.weight_packed", torch.int32)
        scale, shape = self._matrix(f"{name}.weight_scale", *SCALES), self._take(f"{name}.weight_shape")
        if shape.dtype not in (torch.int32, torch.int64) or shape.shape != (2,):
            raise ValueError(
                f"{self.where}: '{name}.weight_shape' is {shape.dtype} {tuple(shape.shape)}; expected 2 integers"
            )
        n, k = shape.tolist()
        if n != len(packed) or k < 1 or -(-k // 8) > packed.shape[1]:
            raise ValueError(f"{self.where}: '{name}.weight_shape' is {[n, k]} of codes {tuple(packed.shape)} of int32")
        self._as_asked(f"{name}.weight_scale", scale, n, k)
        if scale.shape[0] != n:
            raise ValueError(f"{self.where}: '{name}.weight_scale' has shape {tuple(scale.shape)}; expected [{n}, G]")
        zero = None
        if f"{name}.weight_zero_point" in self:
            zero = self._matrix(f"{name}.weight_zero_point", torch.int32)
            if zero.shape != (-(-n // 8), scale.shape[1]):
                raise ValueError(
                    f"{self.where}: '{name}.weight_zero_point' has shape {tuple(zero.shape)}; "
                    f"expected {(-(-n // 8), scale.shape[1])}"
                )
        elif self.schemes and not any(scheme.get("symmetric", True) for scheme in self.schemes):
            raise ValueError(f"{self.where} has no tensor '{name}.weight_zero_point', which asymmetric codes need")
        index = self._optional(f"{name}.weight_g_idx")
        _in_order(index, k // scale.shape[1], name, self.where)
        bits = packed.shape[1] * 32 // max(k, 1)
        u = _nibbles(packed) if bits == 4 else packed.contiguous().view(torch.uint8)
        u = u[:, :k]
        if bits == 4:
            groups = None if zero is None else _nibbles(zero.t()).t()[:n]
            return Codes(pack_int4(u), *_in_groups(scale, groups, k, name))
        if bits != 8 or zero is not None:
            raise ValueError(
                f"{self.where}: {name} has {bits} bits{', zero points' if zero is not None else ''}; expected 4, or 8 without"
            )
        return Codes((u ^ 128).view(torch.int8), _rows_or_groups(scale, n, k, name))

    def _read_plain(self, name: str) -> Codes | None:
        weight = self._find(f"{name}.weight")
        if weight is None or (codes := self.load(weight)).dtype not in (torch.float8_e4m3fn, torch.int8):
            return None
        self.read.add(weight)
        if codes.ndim != 2:
            raise ValueError(f"{self.where}: '{name}.weight' has shape {tuple(codes.shape)}; expected a matrix")
        n, k = codes.shape
        inverse = f"{name}.weight_scale_inv"
        stored = inverse if inverse in self else f"{name}.weight_scale"
        scale = self._scale(stored).float()
        self._as_asked(stored, scale, n, k)
        for unused in ("input_scale", "output_scale", "weight_zero_point"):  # activations are not quantised here
            more = self._optional(f"{name}.{unused}")
            if unused == "weight_zero_point" and more is not None and bool(more.any()):
                raise ValueError(f"{self.where}: {name} has zero points in 8 bits; expected symmetric codes")
        if scale.shape == (-(-n // BLOCK), -(-k // BLOCK)) and scale.numel() > 1 and k % BLOCK == 0:
            return Codes(codes, scale.repeat_interleave(BLOCK, 0)[:n].contiguous())
        return Codes(codes, _rows_or_groups(scale, n, k, name))

    def _read_columns(self, name: str) -> Codes:
        """AWQ and GPTQ, whose matrices are [K, N]."""
        words, zeros = (self._matrix(f"{name}.{part}", torch.int32) for part in ("qweight", "qzeros"))
        scale = self._matrix(f"{name}.scales", *SCALES)
        if self.method == "awq":
            codes, zero = _nibbles(words, AWQ_ORDER), _nibbles(zeros, AWQ_ORDER)
        else:
            codes, zero = _nibbles(words.t()).t(), _nibbles(zeros)
            zero = zero if self.method == "gptq_v2" else zero + 1
        k, n = codes.shape
        if n != scale.shape[1] or zero.shape != scale.shape:
            raise ValueError(
                f"{self.where}: {name} has codes of [{k}, {n}], zero points {tuple(zero.shape)}, scales {tuple(scale.shape)}"
            )
        if self.method != "awq":
            _in_order(self._optional(f"{name}.g_idx"), k // scale.shape[0], name, self.where)
        return Codes(pack_int4(codes.t().contiguous()), *_in_groups(scale.t(), zero.t(), k, name))


def _nibbles(words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """int32 [R, C] → uint8 [R, 8 · C]: column 8 c + i is nibble ``order[i]`` of word c."""
    return torch.stack([(words >> 4 * i & 15).to(torch.uint8) for i in order], 2).flatten(1)


def _in_order(index: Tensor | None, group: int, name: str, where: str) -> None:
    if index is not None and not torch.equal(
        index.long().cpu(), torch.arange(len(index), device="cpu") // max(group, 1)
    ):
        raise ValueError(
            f"{where}: the columns of {name} are reordered (act-order); expected groups of neighbouring columns"
        )


def _in_groups(scale: Tensor, zero: Tensor | None, k: int, name: str) -> tuple[Tensor, Tensor | None]:
    """int4's scales [N, G] of groups that kernels know: longer groups are cut into such."""
    group = k // scale.shape[1]
    known = next((g for g in reversed(GROUPS) if group % g == 0), None)
    if known is None or group * scale.shape[1] != k:
        raise ValueError(f"{name}: int4 in groups of {group} of {k} columns; expected a multiple of {GROUPS[0]}")
    times = group // known
    return scale.repeat_interleave(times, 1), None if zero is None else zero.repeat_interleave(times, 1)


def _rows_or_groups(scale: Tensor, n: int, k: int, name: str) -> Tensor:
    if scale.numel() == 1:
        return scale.reshape(1).float().expand(n).contiguous()
    if scale.numel() == n:
        return scale.reshape(n).float()
    return _in_groups(scale, None, k, name)[0]


def layer_of(
    load: Any, where: str, stored: Sequence[Codes], names: Sequence[str], rows: Sequence[int], columns: int, bias: bool,
    split: int | None,
) -> Quantized:  # fmt: skip
    """A layer of the codes of several matrices [rows, columns], or a rank's share of it."""
    parts = []
    for name, n, codes in zip(names, rows, stored, strict=True):
        per_byte = 2 if codes.codes.dtype == torch.uint8 else 1
        if (shape := (codes.codes.shape[0], codes.codes.shape[1] * per_byte)) != (n, columns):
            raise ValueError(f"{where}: the codes of {name} are of a weight {shape}; expected {(n, columns)}")
        finite(codes.scale.float(), f"{name}: scales")
        if (mine := _kind(codes)) != (first := _kind(stored[0])):
            raise ValueError(
                f"{where}: {name} has {mine}, and {names[0]}, which is computed with it, {first}; expected the same of both"
            )
        parts.append(_share(codes, columns, split, load.rank, load.ranks, name))
    joined: list[Any] = [None if t[0] is None else torch.cat(t).to(load.device) for t in zip(*parts, strict=True)]
    return Quantized.of(Codes(*joined), load.bias(names, rows, split) if bias else None, load.dtype)


def _kind(codes: Codes) -> str:
    """What matrices that are one layer have in common."""
    dtype = str(codes.codes.dtype).removeprefix("torch.")
    scales = "N" if codes.scale.ndim == 1 else f"N, {codes.scale.shape[1]}"
    return f"{dtype} codes, scales [{scales}] and {'no ' * (codes.zero is None)}zero points"


def _share(codes: Codes, columns: int, split: int | None, rank: int, ranks: int, name: str) -> Codes:
    """A rank's rows (0) or columns (1), of which groups are cut into shorter ones where a share would end within one."""
    if ranks == 1 or split is None:
        return codes
    scale, zero = codes.scale, codes.zero
    if split == 1 and scale.ndim == 2:
        group, share = columns // scale.shape[1], columns // ranks
        known = next((g for g in (group, *reversed(GROUPS)) if group % g == 0 and share % g == 0), None)
        if known is None:
            raise ValueError(
                f"tensor parallelism of {ranks}: {name} has {columns} columns in groups of {group}, and a share of {share}; "
                f"expected shares of whole groups of {GROUPS[0]}"
            )
        scale = scale.repeat_interleave(group // known, 1)
        zero = None if zero is None else zero.repeat_interleave(group // known, 1)
    parts = (t if t is None or t.ndim <= split else t.chunk(ranks, split)[rank] for t in (codes.codes, scale, zero))
    return Codes._make(parts)


# ---- writing -----------------------------------------------------------------------------------------------------------------


def settings_of(scheme: Scheme, group: int) -> dict[str, Any]:
    """``quantization_config`` of a folder that is written."""
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme.format == "int4" else 8, "type": "float" if scheme.format == "fp8" else "int",
        "symmetric": not scheme.asymmetric, "strategy": "group" if group else "channel", "group_size": group or None,
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    format = "float-quantized" if scheme.format == "fp8" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "global_compression_ratio": None, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        },
    }  # fmt: skip


def packed(codes: Codes, name: str) -> dict[str, Tensor]:
    """A layer's tensors in compressed-tensors' format, by name."""
    scale = codes.scale if codes.scale.ndim == 2 else codes.scale[:, None]
    if codes.codes.dtype == torch.float8_e4m3fn:
        return {f"{name}.weight": codes.codes, f"{name}.weight_scale": scale.contiguous()}
    k = codes.codes.shape[1] * (2 if codes.codes.dtype == torch.uint8 else 1)
    if codes.codes.dtype == torch.int8:
        words = _as_words(codes.codes.view(torch.uint8) ^ 128)
    else:
        words = _as_words(codes.codes)  # bytes have the lower column in the lower nibble already
    made = {
        f"{name}.weight_packed": words, f"{name}.weight_scale": scale.contiguous(),
        f"{name}.weight_shape": torch.tensor([len(words), k], dtype=torch.int64, device="cpu"),
    }  # fmt: skip
    if codes.zero is not None:
        along_n = torch.nn.functional.pad(codes.zero.t(), (0, -len(codes.zero) % 8)).contiguous()
        made[f"{name}.weight_zero_point"] = _as_words(pack_int4(along_n)).t().contiguous()
    return made


def _as_words(codes: Tensor) -> Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).contiguous().view(torch.int32)


def write_folder(
    folder: str | Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    files: dict[str, str | bytes] | None = None,
) -> int:
    """A model folder in Hugging Face's format; returns bytes of weights.

    Args:
        config: of ``config.json``.
        tensors: names and tensors, written as they come, in files of up to 4 GiB.
        files: others, by name.

    Raises:
        FileExistsError: the folder exists and is not empty.
        ValueError: it cannot be written, to a full disk say. What was written is removed then, as after any error.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; expected a new folder")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _write(folder, config, tensors, files or {})
    except BaseException as error:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for each in made:
            each.rmdir()
        if type(error).__name__ == "SafetensorError" or isinstance(error, OSError):
            raise ValueError(f"writing {folder} failed: {error}") from None
        raise


def _write(
    folder: Path, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], files: dict[str, str | bytes]
) -> int:
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    part: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal part, size
        save_file(part, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(part))
        part, size = {}, 0

    for name, t in tensors:
        more = t.numel() * t.element_size()
        if part and size + more > SHARD:
            flush()
        part[name] = t.detach().cpu().contiguous()
        size, total = size + more, total + more
    flush()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
    else:
        where: dict[str, str] = {}
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            (folder / f"part-{i}").rename(folder / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for path in folder.glob("*.safetensors"):  # safetensors lets the owner alone read them
        path.chmod((folder / "config.json").stat().st_mode)
    return total
