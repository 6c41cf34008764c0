#!/bin/sh
# Prints the path of a Python that works: `find_python.sh 3.12` of that version
# only, `find_python.sh` of the first supported version. Prints nothing, and
# fails, where there is none.
#
# A name on PATH is not enough: a version manager puts a `python3.12` there that
# refuses to start unless that version is chosen, so each candidate is run.

wanted="${1:-any}"

report() {
    "$1" - "$wanted" <<'PYTHON' 2>/dev/null
import sys, venv
version = "%d.%d" % sys.version_info[:2]
if sys.argv[1] not in (version, "any") or sys.version_info < (3, 11):
    sys.exit(1)
print(sys.executable)
PYTHON
}

if [ "$wanted" = any ]; then versions="3.11 3.12 3.13"; else versions="$wanted"; fi

for version in $versions; do
    report "python$version" && exit
    if command -v pyenv >/dev/null 2>&1; then
        for installed in $(pyenv versions --bare 2>/dev/null | grep "^$version\.[0-9]*$" | sort -rV); do
            report "$(pyenv root)/versions/$installed/bin/python" && exit
        done
    fi
done
for name in python3 python; do
    report "$name" && exit
done
exit 1
