#!/bin/sh
# Installs the packages of one image into a new virtual environment: the step that the Dockerfiles run and
# check_steps.sh tries in a clean folder. Dependencies come as wheels only; our own native code is left out where there
# is no compiler.
# usage: install.sh VENV EXTRAS, in the folder of pyproject.toml and constraints.txt
set -eu
venv=$1
extras=$2
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --only-binary :all: \
  --constraint constraints.txt ".[$extras]"
"$venv/bin/python" -m pip check
