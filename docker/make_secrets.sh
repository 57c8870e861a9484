#!/bin/sh
# Makes the secrets of compose.yaml, once; what is there stays. The folder is closed to others; the files are readable,
# because Compose mounts them with their mode into containers of another user.
# usage: docker/make_secrets.sh [FOLDER]
set -eu
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
chmod 0700 "$folder"
random() { od -An -N "$1" -tx1 /dev/urandom | tr -d ' \n'; }
keep() { [ -s "$folder/$1" ] || printf '%s' "$2" >"$folder/$1"; }
keep postgres_password "$(random 24)"
keep prefect_auth "admin:$(random 24)"
keep aws_access_key_id "$(random 10)"
keep aws_secret_access_key "$(random 24)"
rm -f "$folder/s3.json"
printf '{"identities":[{"name":"dflash","credentials":[{"accessKey":"%s","secretKey":"%s"}],"actions":["Admin","Read","Write","List","Tagging"]}]}' \
  "$(cat "$folder/aws_access_key_id")" "$(cat "$folder/aws_secret_access_key")" >"$folder/s3.json"
chmod 0444 "$folder"/*
