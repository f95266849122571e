#!/bin/sh
# The container's command. `serve` asks for an API key: COTERIE_API_KEY, or one that is made at the first
# start, kept in $COTERIE_HOME/api-keys (mode 0600) and printed once. Arguments that say something about
# keys (--api-key-file, --insecure, --config) are passed on as they are.
set -eu
case " $* " in
*" --api-key-file"* | *" --insecure "* | *" --config"* | *" --help "* | *" -h "*) exec coterie "$@" ;;
" serve "*) ;;
*) exec coterie "$@" ;;
esac
umask 077
home=${COTERIE_HOME:?}
if [ -n "${COTERIE_API_KEY:-}" ]; then
  case ${COTERIE_API_KEY#"${COTERIE_API_KEY%%[![:space:]]*}"} in
  "#"*)
    echo "COTERIE_API_KEY begins with #, which begins a comment in a file of keys: choose another key" >&2
    exit 2
    ;;
  esac
  keys=$home/api-keys.environment
  printf '%s\n' "$COTERIE_API_KEY" >"$keys"
  unset COTERIE_API_KEY
else
  keys=$home/api-keys
  if [ ! -s "$keys" ]; then
    key=coterie-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
    printf '%s\n' "$key" >"$keys.new"
    mv "$keys.new" "$keys"
    echo "API key of this server, printed this once: $key"
    echo "Send it as 'Authorization: Bearer KEY'. It is kept in $keys."
  fi
fi
exec coterie "$@" --api-key-file "$keys"
