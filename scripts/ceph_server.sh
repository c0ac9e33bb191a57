#!/bin/sh
# Ceph's S3 gateway on loopback, the exact one: sh scripts/ceph_server.sh DIRECTORY [PORT]
#
# One monitor, one object store in memory (4 GiB at most) and radosgw, all below DIRECTORY, nothing as a service and nothing
# reachable from outside. It prints the environment that reaches it and returns; kill what DIRECTORY/*.pid names to end it:
#     kill $(cat DIRECTORY/*.pid)
# Needs Debian's packages ceph-mon, ceph-osd, ceph-common, radosgw (64 MB to fetch):
#     apt-get install --no-install-recommends ceph-mon ceph-osd ceph-common radosgw
#
# Found out by trying: cluster_addr must be 127.0.0.1, else heartbeat ports listen on every address; without authentication
# between the daemons only version 1 of their messenger starts. (The gateway itself checks S3 signatures.)
set -eu
[ $# -ge 1 ] || { echo "usage: sh scripts/ceph_server.sh DIRECTORY [PORT]" >&2; exit 2; }
for program in ceph-mon ceph-osd ceph radosgw radosgw-admin monmaptool; do
    command -v "$program" >/dev/null || { echo "windlass: $program is not installed (see the top of this script)" >&2; exit 2; }
done
mkdir -p "$1/mon" "$1/osd" "$1/rgw" "$1/log"
place=$(cd "$1" && pwd)
# by the number of this shell: two that start at once must not find the same port free
free_port() { python3 - "$1" <<'P'
import socket, sys
for port in range(int(sys.argv[1]), 65536, 5000):
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)):
            print(port)
            break
P
}
port=${2:-$(free_port $((20000 + $$ % 5000)))}
monitor_port=$(free_port $((25000 + $$ % 5000)))
cluster=$(python3 -c 'import uuid; print(uuid.uuid4())')
key=windlass-test
secret=$(python3 -c 'import secrets; print(secrets.token_hex(16))')
cat >"$place/ceph.conf" <<C
[global]
fsid=$cluster
mon_host=[v1:127.0.0.1:$monitor_port]
mon_initial_members=a
auth_cluster_required=none
auth_service_required=none
auth_client_required=none
osd_pool_default_size=1
osd_pool_default_min_size=1
osd_pool_default_pg_num=1
osd_crush_chooseleaf_type=0
mon_allow_pool_size_one=true
mon_warn_on_pool_no_redundancy=false
ms_bind_ipv4=true
ms_bind_msgr1=true
ms_bind_msgr2=false
public_addr=127.0.0.1
cluster_addr=127.0.0.1
osd_heartbeat_addr=127.0.0.1
log_file=$place/log/\$name.log
admin_socket=$place/\$name.asok
pid_file=$place/\$name.pid
run_dir=$place
keyring=$place/keyring
[mon.a]
mon_data=$place/mon
[osd.0]
osd_data=$place/osd
osd_objectstore=memstore
memstore_device_bytes=4294967296
osd_class_load_list=*
osd_class_default_list=*
[client.rgw]
rgw_frontends=beast endpoint=127.0.0.1:$port
rgw_data=$place/rgw
rgw_thread_pool_size=32
C
conf="$place/ceph.conf"
touch "$place/keyring"
# On a busy machine it may ask the monitor before it knows the cluster ("wrong fsid"), and end: then it is started again.
start_store() {
    for _ in 1 2 3 4 5; do
        ceph-osd -c "$conf" -i 0
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            timeout 60 ceph -c "$conf" osd stat | grep -q "1 up" && return 0
            sleep 1
        done
    done
    return 1
}
{ # each step needs the one before; `set -e` is off before ||, and -x lets the last lines of the log name the step that failed
    set -x
    monmaptool --create --clobber --fsid "$cluster" --addv a "[v1:127.0.0.1:$monitor_port]" "$place/monmap" &&
        ceph-mon -c "$conf" -i a --mkfs --monmap "$place/monmap" --mon-data "$place/mon" &&
        ceph-mon -c "$conf" -i a --mon-data "$place/mon" &&
        timeout 200 ceph -c "$conf" osd create &&
        ceph-osd -c "$conf" -i 0 --mkfs &&
        start_store &&
        timeout 200 ceph -c "$conf" osd crush add osd.0 1.0 root=default host=localhost &&
        radosgw -c "$conf" -n client.rgw &&
        timeout 300 radosgw-admin -c "$conf" user create --uid=windlass --display-name=windlass --access-key="$key" --secret-key="$secret"
} >"$place/log/start.log" 2>&1 || { tail -n 5 "$place/log/start.log" >&2; exit 1; }
{ set +x; } 2>/dev/null
tries=0
until python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/', timeout=2)" 2>/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -lt 120 ] || { echo "windlass: the gateway did not answer on port $port within a minute" >&2; exit 1; }
    sleep 0.5
done
echo "export AWS_ACCESS_KEY_ID=$key"
echo "export AWS_SECRET_ACCESS_KEY=$secret"
echo "export AWS_ENDPOINT_URL=http://127.0.0.1:$port"
echo "export AWS_DEFAULT_REGION=us-east-1"
