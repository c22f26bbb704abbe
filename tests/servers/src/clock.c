/* A clock of the tests' own, preloaded into the programs that shall have it: the clock of the machine, so many seconds
 * ahead as the file in IDEM_CLOCK says. What measures how long something takes goes on as before.
 *
 * Postgres asks for the time in handlers of signals, which may come while it allocates memory. So nothing here allocates,
 * locks, or opens anything once the program runs: the file is mapped. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *seconds_ahead;

__attribute__((constructor)) static void map_the_file(void) {
    const char *file = getenv("IDEM_CLOCK");
    int descriptor = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        /* A clock that stays right would be a test that tests nothing. */
        perror("IDEM_CLOCK names no file that can be mapped");
        abort();
    }
    close(descriptor);
    seconds_ahead = mapped;
}

static int64_t ahead(void) {
    return seconds_ahead ? *seconds_ahead : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = syscall(SYS_gettimeofday, now, zone);
    if (result == 0)
        now->tv_sec += ahead();
    return result;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now)
        *now = precise.tv_sec;
    return precise.tv_sec;
}
