#!/bin/sh
# Makes the secrets of compose.yaml, once; what is there stays. The folder is closed to others; the files are readable,
# because Compose mounts them with their mode into containers of another user.
# usage: docker/make_secrets.sh [FOLDER]
set -eu
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
chmod 0700 "$folder"
random() { od -An -N "$1" -tx1 /dev/urandom | tr -d ' \n'; }
keep() { # an empty file is of a full disk, and can't be written by its owner
  [ -s "$folder/$1" ] || { rm -f "$folder/$1" && printf '%s' "$2" >"$folder/$1"; }
}
keep postgres_password "$(random 24)"
keep prefect_auth "admin:$(random 24)"
keep aws_access_key_id "$(random 10)"
keep aws_secret_access_key "$(random 24)"
for name in aws_access_key_id aws_secret_access_key; do
  case "$(cat "$folder/$name")" in
  *[!A-Za-z0-9/+=_.-]*)
    echo "$folder/$name: expected letters, digits and any of /+=_.- alone, since s3.json repeats it" >&2
    exit 2
    ;;
  esac
done
rm -f "$folder/s3.json"
printf '{"identities":[{"name":"dflash","credentials":[{"accessKey":"%s","secretKey":"%s"}],"actions":["Admin","Read","Write","List","Tagging"]}]}' \
  "$(cat "$folder/aws_access_key_id")" "$(cat "$folder/aws_secret_access_key")" >"$folder/s3.json"
chmod 0444 "$folder"/*
