/* An LD_PRELOAD shim that kills its process with SIGKILL before the N-th call that changes a directory.
 *
 *   KILLPOINT_ROOT  absolute path without symbolic links; a call counts if a path it changes begins with this text
 *                   (so ROOT, ROOT/x and ROOT.work/x do), or if it syncs the directory that holds ROOT
 *   KILLPOINT_N     kill before the N-th counted call, from 1; 0 or unset: never
 *   KILLPOINT_SIGNAL  the number of another signal to send; SIGSTOP stops the process once, there
 *   KILLPOINT_LOG   append "<number>\t<call|kill>\t<name>\t<path>[\t<second path>]" for each counted call, before it
 *                   runs; "kill" is the one that did not run
 *
 * The counter is one per process and shared by its threads. Our own work goes through raw system calls, which no
 * wrapper sees. Not seen: stores into a shared mapping, io_uring, stdio's own writes (fopen, fwrite), inline system
 * calls (Rust's rustix), and functions fetched from a libc handle (ctypes.CDLL("libc.so.6"); ctypes.CDLL(None) is
 * seen). x86-64 Linux.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long raw(long number, long a, long b, long c, long d, long e) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return result;
}

/* ---- which path a call means ---------------------------------------------------------------------------------- */

typedef char path_t[2 * PATH_MAX];

static int read_link(const char *link, path_t out) {
    long n = raw(SYS_readlink, (long)link, (long)out, PATH_MAX, 0, 0);
    out[n > 0 ? n : 0] = 0;
    return n > 0;
}

static int path_of_fd(int fd, path_t out) {
    char link[48];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return read_link(link, out);
}

/* The directory part is resolved by opening it, so links and ".." in it do not hide a path; the last name is kept. */
static int path_of_name(int dirfd, const char *name, path_t out) {
    size_t length = name ? strlen(name) : 0;
    while (length > 1 && name[length - 1] == '/') length--;
    if (length == 0 || length >= PATH_MAX) return 0;
    char parent[PATH_MAX] = ".", last[PATH_MAX];
    memcpy(last, name, length);
    last[length] = 0;
    char *slash = strrchr(last, '/'), *base = last;
    if (slash) {
        base = slash + 1;
        snprintf(parent, sizeof parent, "%.*s", slash == last ? 1 : (int)(slash - last), last);
    }
    long fd = raw(SYS_openat, dirfd, (long)parent, O_PATH | O_DIRECTORY | O_CLOEXEC, 0, 0);
    if (fd < 0) return 0; /* no such directory: the call will fail and change nothing */
    int known = path_of_fd((int)fd, out);
    raw(SYS_close, fd, 0, 0, 0, 0);
    if (!known) return 0;
    size_t end = strlen(out);
    snprintf(out + end, sizeof(path_t) - end, "%s%s", end > 1 ? "/" : "", base);
    return 1;
}

/* ---- counting ------------------------------------------------------------------------------------------------- */

static atomic_long counted;

static int under_root(const char *path) {
    const char *root = getenv("KILLPOINT_ROOT");
    return root && *root && strncmp(path, root, strlen(root)) == 0;
}

static int holds_root(const char *path) {
    const char *root = getenv("KILLPOINT_ROOT"), *slash = root ? strrchr(root, '/') : NULL;
    return slash && strlen(path) == (size_t)(slash - root) && strncmp(path, root, (size_t)(slash - root)) == 0;
}

static void count(const char *name, const char *path, const char *second) {
    const char *limit = getenv("KILLPOINT_N"), *log = getenv("KILLPOINT_LOG");
    long number = atomic_fetch_add(&counted, 1) + 1, last = limit ? atol(limit) : 0;
    /* ">=": no other thread gets past the kill point while the signal is on its way. */
    int kill = last > 0 && number >= last;
    if (log && *log && (!kill || number == last)) {
        char line[4 * PATH_MAX + 64];
        int size = snprintf(line, sizeof line, "%ld\t%s\t%s\t%s%s%s\n", number, kill ? "kill" : "call", name, path,
                            second ? "\t" : "", second ? second : "");
        if (size > (int)sizeof line - 1) size = (int)sizeof line - 1;
        long fd = raw(SYS_openat, AT_FDCWD, (long)log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644, 0);
        if (fd >= 0) {
            raw(SYS_write, fd, (long)line, size, 0, 0);
            raw(SYS_close, fd, 0, 0, 0, 0);
        }
    }
    if (!kill) return;
    const char *other = getenv("KILLPOINT_SIGNAL");
    int signal = other ? atoi(other) : SIGKILL;
    if (signal != SIGSTOP) {
        while (number > last) raw(SYS_pause, 0, 0, 0, 0, 0); /* the line of the call that is prevented comes first */
        for (;;) raw(SYS_kill, raw(SYS_getpid, 0, 0, 0, 0, 0), signal, 0, 0, 0);
    }
    if (number != last) return;
    /* To this thread: sent to the process, another thread might take it later, and this one would go on meanwhile. */
    raw(SYS_tgkill, raw(SYS_getpid, 0, 0, 0, 0, 0), raw(SYS_gettid, 0, 0, 0, 0, 0), SIGSTOP, 0, 0);
}

static void on_fd(const char *name, int fd) {
    int saved = errno;
    path_t path;
    if (path_of_fd(fd, path) && (under_root(path) || (strstr(name, "sync") && holds_root(path))))
        count(name, path, NULL);
    errno = saved;
}

static void on_name(const char *name, int dirfd, const char *file) {
    int saved = errno;
    path_t path;
    if (path_of_name(dirfd, file, path) && under_root(path)) count(name, path, NULL);
    errno = saved;
}

static void on_names(const char *name, int from_dir, const char *from, int to_dir, const char *to) {
    int saved = errno;
    path_t first, second;
    if (!path_of_name(from_dir, from, first) || !path_of_name(to_dir, to, second)) return;
    if (under_root(first) || under_root(second)) count(name, first, second);
    errno = saved;
}

static void on_open(const char *name, int dirfd, const char *file, int flags) {
    if ((flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY) on_name(name, dirfd, file);
}

/* ---- the wrappers --------------------------------------------------------------------------------------------- */

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

/* WRAP(result, name, (parameters), (arguments), what to count): the call is passed on unchanged. */
#define WRAP(result, name, parameters, arguments, before)                                                             \
    result name parameters {                                                                                          \
        static result(*_Atomic next) parameters;                                                                      \
        if (!next) next = (result(*) parameters)real(#name);                                                          \
        before;                                                                                                       \
        return next arguments;                                                                                        \
    }

/* open takes its mode only when it creates. */
#define WRAP_OPEN(name, parameters, arguments, dirfd)                                                                 \
    int name parameters {                                                                                             \
        static int(*_Atomic next) parameters;                                                                         \
        if (!next) next = (int(*) parameters)real(#name);                                                             \
        mode_t mode = 0;                                                                                              \
        if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) {                                                  \
            va_list rest;                                                                                             \
            va_start(rest, flags);                                                                                    \
            mode = va_arg(rest, mode_t);                                                                              \
            va_end(rest);                                                                                             \
        }                                                                                                             \
        on_open(#name, dirfd, file, flags);                                                                           \
        return next arguments;                                                                                        \
    }

WRAP_OPEN(open, (const char *file, int flags, ...), (file, flags, mode), AT_FDCWD)
WRAP_OPEN(open64, (const char *file, int flags, ...), (file, flags, mode), AT_FDCWD)
WRAP_OPEN(openat, (int fd, const char *file, int flags, ...), (fd, file, flags, mode), fd)
WRAP_OPEN(openat64, (int fd, const char *file, int flags, ...), (fd, file, flags, mode), fd)
WRAP(int, creat, (const char *file, mode_t mode), (file, mode), on_name("creat", AT_FDCWD, file))
WRAP(int, creat64, (const char *file, mode_t mode), (file, mode), on_name("creat64", AT_FDCWD, file))

#define ON_FD(result, name, parameters, arguments) WRAP(result, name, parameters, arguments, on_fd(#name, fd))
ON_FD(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(ssize_t, writev, (int fd, const struct iovec *parts, int n), (fd, parts, n))
ON_FD(ssize_t, pwritev, (int fd, const struct iovec *parts, int n, off_t at), (fd, parts, n, at))
ON_FD(ssize_t, pwritev64, (int fd, const struct iovec *parts, int n, off64_t at), (fd, parts, n, at))
ON_FD(ssize_t, pwritev2, (int fd, const struct iovec *parts, int n, off_t at, int flags), (fd, parts, n, at, flags))
ON_FD(ssize_t, pwritev64v2, (int fd, const struct iovec *parts, int n, off64_t at, int flags),
      (fd, parts, n, at, flags))
ON_FD(ssize_t, sendfile, (int fd, int in, off_t *at, size_t size), (fd, in, at, size))
ON_FD(ssize_t, sendfile64, (int fd, int in, off64_t *at, size_t size), (fd, in, at, size))
ON_FD(ssize_t, copy_file_range, (int in, off64_t *from, int fd, off64_t *to, size_t size, unsigned int flags),
      (in, from, fd, to, size, flags))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, syncfs, (int fd), (fd))
ON_FD(int, sync_file_range, (int fd, off64_t at, off64_t size, unsigned int flags), (fd, at, size, flags))
ON_FD(int, ftruncate, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))
ON_FD(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
ON_FD(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
ON_FD(int, posix_fallocate, (int fd, off_t at, off_t size), (fd, at, size))
ON_FD(int, posix_fallocate64, (int fd, off64_t at, off64_t size), (fd, at, size))
ON_FD(int, fchmod, (int fd, mode_t mode), (fd, mode))

#define ON_NAME(name, parameters, arguments, dirfd) WRAP(int, name, parameters, arguments, on_name(#name, dirfd, file))
ON_NAME(truncate, (const char *file, off_t size), (file, size), AT_FDCWD)
ON_NAME(truncate64, (const char *file, off64_t size), (file, size), AT_FDCWD)
ON_NAME(unlink, (const char *file), (file), AT_FDCWD)
ON_NAME(unlinkat, (int fd, const char *file, int flags), (fd, file, flags), fd)
ON_NAME(remove, (const char *file), (file), AT_FDCWD)
ON_NAME(rmdir, (const char *file), (file), AT_FDCWD)
ON_NAME(mkdir, (const char *file, mode_t mode), (file, mode), AT_FDCWD)
ON_NAME(mkdirat, (int fd, const char *file, mode_t mode), (fd, file, mode), fd)
ON_NAME(symlink, (const char *text, const char *file), (text, file), AT_FDCWD)
ON_NAME(symlinkat, (const char *text, int fd, const char *file), (text, fd, file), fd)
ON_NAME(chmod, (const char *file, mode_t mode), (file, mode), AT_FDCWD)
ON_NAME(fchmodat, (int fd, const char *file, mode_t mode, int flags), (fd, file, mode, flags), fd)

#define ON_NAMES(name, parameters, arguments, from_dir, to_dir)                                                       \
    WRAP(int, name, parameters, arguments, on_names(#name, from_dir, from, to_dir, to))
ON_NAMES(rename, (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD)
ON_NAMES(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), a, b)
ON_NAMES(renameat2, (int a, const char *from, int b, const char *to, unsigned int flags), (a, from, b, to, flags), a, b)
ON_NAMES(link, (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD)
ON_NAMES(linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags), a, b)

/* What programs reach through syscall(2) for lack of a libc function, now or on older systems. */
long syscall(long number, ...) {
    static long (*_Atomic next)(long, ...);
    if (!next) next = (long (*)(long, ...))real("syscall");
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    switch (number) {
    case SYS_renameat2: on_names("renameat2", (int)a[0], (const char *)a[1], (int)a[2], (const char *)a[3]); break;
    case SYS_copy_file_range: on_fd("copy_file_range", (int)a[2]); break;
    case SYS_sendfile: on_fd("sendfile", (int)a[0]); break;
    case SYS_write: on_fd("write", (int)a[0]); break;
    case SYS_pwrite64: on_fd("pwrite64", (int)a[0]); break;
    case SYS_fsync: on_fd("fsync", (int)a[0]); break;
    case SYS_fdatasync: on_fd("fdatasync", (int)a[0]); break;
    case SYS_ftruncate: on_fd("ftruncate", (int)a[0]); break;
    case SYS_fallocate: on_fd("fallocate", (int)a[0]); break;
    }
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
