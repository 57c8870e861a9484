#!/bin/sh
# Entry point of the images: takes secrets from files, refuses an open server without a password, becomes the command.
# For each variable NAME below, NAME_FILE names a file with its value, as mounted by Compose or Kubernetes.
set -eu
for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY DFLASH_API_KEY PREFECT_API_AUTH_STRING PREFECT_API_KEY \
  PREFECT_SERVER_API_AUTH_STRING PREFECT_SERVER_DATABASE_PASSWORD; do
  eval "file=\${${name}_FILE:-}"
  if [ -n "$file" ]; then
    if [ ! -r "$file" ]; then
      echo "entrypoint: ${name}_FILE names $file: expected a file that user $(id -u) can read; mount the secret there" >&2
      exit 2
    fi
    value=$(cat "$file")
    export "$name=$value"
    unset "${name}_FILE" value
  fi
done
case "$*" in
*"prefect server start"*)
  host=${PREFECT_SERVER_API_HOST:-127.0.0.1}
  case "$*" in *--host*) host="the address of --host" ;; esac
  case "$host" in
  127.* | localhost | ::1) ;;
  *)
    if [ -z "${PREFECT_SERVER_API_AUTH_STRING:-}" ]; then
      echo "entrypoint: the Prefect server would listen on $host without a password: expected" \
        "PREFECT_SERVER_API_AUTH_STRING or its _FILE, as user:password; found neither" >&2
      exit 2
    fi
    ;;
  esac
  ;;
esac
exec "$@"
