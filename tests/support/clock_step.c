/* Steps the wall clock of one process: adds the nanoseconds in the file $CLOCK_STEP, an int64, to CLOCK_REALTIME. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *step;

static int64_t step_ns(void) {
    static int64_t none;
    if (!step) {
        const char *path = getenv("CLOCK_STEP");
        int file = path ? open(path, O_RDONLY) : -1;
        void *mapped = file < 0 ? MAP_FAILED : mmap(0, sizeof *step, PROT_READ, MAP_SHARED, file, 0);
        step = mapped == MAP_FAILED ? &none : mapped;
    }
    return *step;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t all = now->tv_sec * INT64_C(1000000000) + now->tv_nsec + step_ns();
        now->tv_sec = all / 1000000000;
        now->tv_nsec = all % 1000000000;
    }
    return failed;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
