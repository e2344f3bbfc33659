/* Ranks of MPI in C in which something is wrong, by name: `native NAME`. Rank 2 is the odd one. */

#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define APART __attribute__((noinline))

static volatile int done;

APART static void own_lock(void)
{
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    pthread_mutex_lock(&lock);
    done++;
}

APART static void sleeping(void)
{
    sleep(3600);
    done++;
}

APART static void other_collective(void)
{
    int value = 1;
    MPI_Bcast(&value, 1, MPI_INT, 0, MPI_COMM_SELF);
    MPI_Barrier(MPI_COMM_WORLD);
    done++;
}

APART static void message(void)
{
    int value;
    MPI_Recv(&value, 1, MPI_INT, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    done++;
}

APART static void endless(void)
{
    for (;;)
        done++;
}

static const struct {
    const char *name;
    void (*run)(void);
} causes[] = {
    {"own_lock", own_lock}, {"sleeping", sleeping}, {"other_collective", other_collective},
    {"message", message},   {"endless", endless},
};

APART static void all_reduce(void)
{
    double one = 1, sum;
    MPI_Allreduce(&one, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    done++;
}

int main(int count, char **words)
{
    int rank;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (size_t i = 0; rank == 2 && i < sizeof causes / sizeof *causes; i++)
        if (count == 2 && !strcmp(words[1], causes[i].name))
            causes[i].run();
    all_reduce();
    MPI_Finalize();
    return 0;
}
