/* The handler of a timer writes into the log, and interrupts the thread that holds the lock of the log. */
#include "crew.h"
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static volatile long sum;

static void log_line(long number) {
    pthread_mutex_lock(&log_lock);
    for (long i = 0; i < 20000000; i++)
        sum += number * i;
    pthread_mutex_unlock(&log_lock);
}

static void on_timer(int signal) { log_line(signal); }

static void write_checkpoint(void) {
    struct itimerval soon = {.it_value = {.tv_usec = 50000}, .it_interval = {.tv_usec = 50000}};
    signal(SIGALRM, on_timer);
    setitimer(ITIMER_REAL, &soon, NULL);
    for (int i = 0; i < 100; i++)
        log_line(i);
}

int main(void) {
    crew_open();
    crew_meet();
    if (rank == 1)
        write_checkpoint();
    crew_meet();
    return 0;
}
