#!/bin/sh
# Entry point of the images: takes secrets from files, refuses an open server without a password, becomes the command.
# For each variable NAME below, NAME_FILE names a file with its value, as mounted by Compose or Kubernetes.
set -eu
for name in AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY DFLASH_API_KEY PREFECT_API_AUTH_STRING PREFECT_API_KEY \
  PREFECT_SERVER_API_AUTH_STRING PREFECT_SERVER_DATABASE_PASSWORD; do
  eval "file=\${${name}_FILE:-} given=\${$name:-}"
  [ -n "$file" ] || continue
  if [ -n "$given" ]; then
    echo "entrypoint: both $name and ${name}_FILE are set: expected one of them" >&2
    exit 2
  fi
  if [ -d "$file" ] || [ ! -r "$file" ]; then # an engine makes a folder where a mounted file is missing
    echo "entrypoint: ${name}_FILE names $file: expected a file that user $(id -u) can read; mount the secret there" >&2
    exit 2
  fi
  value=$(cat "$file")
  case "$value" in
  '' | *[[:cntrl:]]*) # no header and no password takes a line break, and an empty one would be none
    echo "entrypoint: ${name}_FILE names $file: expected one line without control characters, found none or more" >&2
    exit 2
    ;;
  esac
  export "$name=$value"
  unset "${name}_FILE" value
done
unset file given
case " $* " in
*prefect*" server "*start*)
  host=${PREFECT_SERVER_API_HOST-127.0.0.1}
  case "$*" in *--host*) host="the address of --host" ;; esac
  case "$host" in
  localhost | ::1) host=loopback ;;
  *[!0-9.]*) ;; # a name may be that of any address
  127.*) host=loopback ;;
  esac
  if [ "$host" != loopback ] && [ -z "${PREFECT_SERVER_API_AUTH_STRING:-}" ]; then
    echo "entrypoint: the Prefect server would listen on ${host:-every address} without a password: expected" \
      "PREFECT_SERVER_API_AUTH_STRING or its _FILE, as user:password; found neither" >&2
    exit 2
  fi
  ;;
esac
exec "$@"
