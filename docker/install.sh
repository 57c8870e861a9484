#!/bin/sh
# Installs the packages of one image into a new virtual environment: the step that the Dockerfiles run and
# check_steps.sh tries in a clean folder. Wheels only, so that no image needs a compiler to be built.
# usage: install.sh VENV EXTRAS, in the folder of pyproject.toml and constraints.txt
set -eu
venv=$1
extras=$2
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --only-binary :all: \
  --constraint constraints.txt ".[$extras]"
"$venv/bin/python" -m pip check
