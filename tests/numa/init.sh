#!/bin/busybox sh
# The first process of the guest, from its initramfs. It mounts the host's file system read-only, keeps all changes in
# memory, and runs the script that the kernel's command line names.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in $(cat /modules/order); do insmod "/modules/$module"; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=524288,cache=loose host /host
mount -t tmpfs tmpfs /changes
mkdir /changes/upper /changes/work
mount -t overlay -o lowerdir=/host,upperdir=/changes/upper,workdir=/changes/work overlay /guest
for folder in proc sys dev; do mount --move "/$folder" "/guest/$folder"; done
mkdir -p /guest/dev/shm
mount -t tmpfs -o mode=1777 tmpfs /guest/dev/shm
mount -t cgroup2 cgroup2 /guest/sys/fs/cgroup
ip link set lo up
# shellcheck disable=SC2154  # the kernel passes `job=...` of its command line as a variable
chroot /guest /bin/bash "$job" </guest/dev/null
echo "=== guest: exit $?"
sleep 1 # so that the serial line can send the last line
poweroff -f
