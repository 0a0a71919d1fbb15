#!/bin/sh
# The services of docs/examples/deploy/fleet.yaml in an image of Debian's packages and SeaweedFS: it takes the environment of the images of
# PostgreSQL and MinIO that the file names.
set -e
if [ -n "$MINIO_ROOT_USER" ]; then
    export AWS_ACCESS_KEY_ID="$MINIO_ROOT_USER" AWS_SECRET_ACCESS_KEY="$MINIO_ROOT_PASSWORD"
    mkdir -p /data
    exec weed server -dir=/data -ip.bind=0.0.0.0 -s3 -s3.port=9000 -s3.autoCreateBucket=false -master.telemetry=false -volume.max=100 -master.volumeSizeLimitMB=64
fi
programs=$(echo /usr/lib/postgresql/*/bin)
data=/var/lib/postgresql/data
as_postgres() { runuser -u postgres -- "$@"; }
if [ ! -s $data/PG_VERSION ]; then
    mkdir -p $data
    chown postgres $data
    chmod 700 $data
    umask 077
    printf %s "$POSTGRES_PASSWORD" >/tmp/password
    chown postgres /tmp/password
    as_postgres "$programs/initdb" -D $data --encoding=UTF8 --locale=C.UTF-8 --username="$POSTGRES_USER" --pwfile=/tmp/password --auth-local=trust --auth-host=scram-sha-256
    rm /tmp/password
    echo "host all all all scram-sha-256" >>$data/pg_hba.conf
    echo "CREATE DATABASE $POSTGRES_DB" | as_postgres "$programs/postgres" --single -D $data postgres
fi
mkdir -p /run/postgresql
chown postgres /run/postgresql
exec runuser -u postgres -- "$programs/postgres" -D $data -c listen_addresses='*'
