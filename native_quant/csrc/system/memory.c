/* Placement of pages on NUMA nodes by Linux's memory policies (mempolicy(7)), without libnuma; pages of mapped
 * files. */
#define _GNU_SOURCE
#include "memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ktq.h"

enum { WORD_BITS = 64, MAX_NODES = KTQ_NODE_WORDS * WORD_BITS };
/* Of a longer range, Linux reads no more than the device's read-ahead setting, which often is this much. */
enum { READ_AHEAD = 128 << 10 };

void kt_read_ahead(const void *address, int64_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), end = (uintptr_t)address + (uintptr_t)bytes;
    for (uintptr_t at = (uintptr_t)address / page * page; at < end; at += READ_AHEAD)
        madvise((void *)at, end - at < READ_AHEAD ? end - at : READ_AHEAD, MADV_WILLNEED);
}

static int set_policy(void *address, size_t length, int mode, int count, const int *nodes, unsigned flags) {
    uint64_t mask[KTQ_NODE_WORDS] = {0};
    if (!address || count < 1 || !nodes) return KTQ_EINVAL;
    for (int i = 0; i < count; i++) {
        if (nodes[i] < 0 || nodes[i] >= MAX_NODES) return KTQ_EINVAL;
        mask[nodes[i] / WORD_BITS] |= UINT64_C(1) << nodes[i] % WORD_BITS;
    }
    /* + 1: the kernel takes one bit less than it is told */
    return syscall(SYS_mbind, address, length, mode, mask, MAX_NODES + 1, flags) == 0 ? KTQ_OK : KTQ_ESYSTEM;
}

int ktq_place_memory(void *address, size_t length, int count, const int *nodes) {
    return set_policy(address, length, count == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE, count, nodes, 0);
}

int ktq_gather_memory(void *address, size_t length, int node) {
    int error = set_policy(address, length, MPOL_BIND, 1, &node, MPOL_MF_MOVE);
    int restored = set_policy(address, length, MPOL_PREFERRED, 1, &node, 0);
    return error ? error : restored;
}

int ktq_memory_policy(int *mode, uint64_t *nodes) {
    if (!mode || !nodes) return KTQ_EINVAL;
    return syscall(SYS_get_mempolicy, mode, nodes, MAX_NODES + 1, NULL, 0) == 0 ? KTQ_OK : KTQ_ESYSTEM;
}
