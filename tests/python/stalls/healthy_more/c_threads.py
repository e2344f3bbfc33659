"""Ranks are programs in C whose threads compute for 9 s or wait for a condition with a limit; the main thread joins."""

import os
import subprocess
import tempfile

CODE = r"""
#include <pthread.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
static void *computes(void *none) { double end = now() + 9; while (now() < end); return none; }
static void *waits(void *none) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 11;
    pthread_mutex_lock(&lock);
    while (pthread_cond_timedwait(&condition, &lock, &end) == 0);
    pthread_mutex_unlock(&lock);
    return none;
}
int main(void) {
    for (;;) {
        pthread_t one, other;
        pthread_create(&one, 0, computes, 0);
        pthread_create(&other, 0, waits, 0);
        pthread_join(one, 0);
        pthread_join(other, 0);
    }
}
"""
folder = tempfile.mkdtemp()
program = os.path.join(folder, "threads")
subprocess.run(["gcc", "-x", "c", "-o", program, "-", "-lpthread"], input=CODE.encode(), check=True)
os.execv(program, [program])
