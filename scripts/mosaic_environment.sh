#!/bin/sh
# Makes .venv-mosaic, a virtual environment of its own with MosaicML's streaming library: sh scripts/mosaic_environment.sh
#
# Only for the proof that their library reads what we write and the reverse (benchmarks/mosaic_agree.py) and for the reading
# race (benchmarks/mosaic_speed.py). It cannot share our environment: 0.13.0, the newest, pins transformers<5 and numpy<2.2.
#
# Left out of its 79 dependencies: the clients of cloud stores that it imports only when it uses them (oci 221 MB, azure,
# google). torchvision is replaced by a stub of three names, since its wheels on PyPI do not fit a CPU build of torch
# ("operator torchvision::nms does not exist") and only streaming.vision, which nobody uses here, needs it. PYTHON=python3.12
# chooses another interpreter.
set -eu
cd "$(dirname "$0")/.."
environment=.venv-mosaic
[ -f "$environment/stamp" ] && exit 0
rm -rf "$environment"
"${PYTHON:-python3.11}" -m venv "$environment"
install="$environment/bin/python -m pip install --disable-pip-version-check --quiet"
$install "torch==2.13.0" "numpy>=2.1,<2.2" "transformers>=4.57,<5" boto3 brotli catalogue filelock matplotlib paramiko pillow \
    psutil python-snappy requests tqdm "xxhash<4" "zstd<2"
$install --no-deps "mosaicml-streaming==0.13.0"
packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages/torchvision/datasets" "$packages/torchvision/transforms"
: >"$packages/torchvision/__init__.py"
: >"$packages/torchvision/transforms/__init__.py"
printf 'class VisionDataset:\n    pass\n' >"$packages/torchvision/datasets/__init__.py"
printf 'to_tensor = None\n' >"$packages/torchvision/transforms/functional.py"
"$environment/bin/python" -c 'import streaming; print("== mosaicml-streaming", streaming.__version__, "in .venv-mosaic")'
touch "$environment/stamp"
