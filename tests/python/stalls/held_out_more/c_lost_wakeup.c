/* A thread signals that the buffer is full before the other waits for it, and then waits itself until it is taken. */
#include "crew.h"
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t full = PTHREAD_COND_INITIALIZER, taken = PTHREAD_COND_INITIALIZER;

static void *fill_buffer(void *unused) {
    pthread_mutex_lock(&lock);
    pthread_cond_signal(&full);
    pthread_cond_wait(&taken, &lock);
    pthread_mutex_unlock(&lock);
    return unused;
}

static void take_buffer(void) {
    pthread_mutex_lock(&lock);
    pthread_cond_wait(&full, &lock);
    pthread_cond_signal(&taken);
    pthread_mutex_unlock(&lock);
}

int main(void) {
    crew_open();
    crew_meet();
    if (rank == 2) {
        pthread_t filler;
        pthread_create(&filler, NULL, fill_buffer, NULL);
        usleep(200000);
        take_buffer();
        pthread_join(filler, NULL);
    }
    crew_meet();
    return 0;
}
