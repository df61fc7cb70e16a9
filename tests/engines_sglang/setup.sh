#!/usr/bin/env bash
# A virtual environment with SGLang that runs without a GPU, for the tests of this folder. About four minutes, 4 GB.
# usage: tests/engines_sglang/setup.sh VENV     (PYTHON: which interpreter, python3.11 unless told)
set -euo pipefail

venv=${1:?usage: setup.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3.11}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Its own metadata asks for a CUDA torch and a row of CUDA packages: torch first, then it alone, then what it imports.
pip torch==2.13.0
torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
echo "torch==$torch" > "$venv/constraints.txt"
pip --no-deps sglang==0.5.23 torchvision==0.28.0 timm==1.0.25
pip -c "$venv/constraints.txt" -r "$here/requirements.txt"

# What stands in for compiled parts that there are only for GPUs (see cpu/).
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$here/cpu/." "$packages/"
echo 'import kvolt_torchvision_shim' > "$packages/kvolt_torchvision_shim.pth"

# kvolt itself: from the source, so that nothing is compiled into the tree.
echo "$root/src" > "$packages/kvolt_source.pth"
"$venv/bin/python" -c 'import kvolt, sglang; print("kvolt", kvolt.__version__, "sglang", sglang.__version__)'
