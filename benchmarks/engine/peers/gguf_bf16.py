"""Write a GGUF file anew with its matrices dequantized to bfloat16: for llama.cpp, the weights that all others read.

Runs in the environment of transformers. usage: gguf_bf16.py FILE.gguf NEW.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFValueType

_MADE_ANEW = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def main(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, field in reader.fields.items():
        if not name.startswith(_MADE_ANEW):
            inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
            continue
        packed = gguf.quants.quantize(values, GGMLQuantizationType.BF16)
        writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
