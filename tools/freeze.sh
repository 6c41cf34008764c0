#!/bin/sh
# Prints constraints for one Python version: `freeze.sh 3.12`. What a fresh
# environment holds after installing the package with everything optional.
set -e
python=$(sh "$(dirname "$0")/find_python.sh" "$1")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet hatchling hatch-fancy-pypi-readme editables uv >&2
"$place/venv/bin/pip" install --quiet --no-build-isolation '.[demo,site,test]' >&2
echo "# Exact versions for Python $1. Made by \`make constraints\`."
"$place/venv/bin/pip" freeze | grep '==' | grep -v '^batchax' | sort -f
