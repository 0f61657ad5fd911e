/* MPI's side of `mesh_bench`: all-reduces what it is told to, and says how long that took.
 *
 * Every rank holds a Unix socket to the benchmark and blocks in a read of it while others have their turn: an MPI rank that
 * waited inside MPI would keep a processor busy.
 *
 *     mpicc -O2 -o allreduce allreduce.c
 */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

enum { ORDER_BYTES_MAX = 1 << 16, TENSORS_MAX = 1 << 12 };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static FILE *dial(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (path == NULL || strlen(path) >= sizeof address.sun_path) {
        fprintf(stderr, "MESH_BENCH_SOCKET is missing or too long\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    strcpy(address.sun_path, path);
    int line = socket(AF_UNIX, SOCK_STREAM, 0);
    if (line < 0 || connect(line, (struct sockaddr *)&address, sizeof address) != 0) fail("cannot reach the benchmark");
    FILE *stream = fdopen(line, "r+");
    if (stream == NULL) fail("fdopen");
    return stream;
}

int main(int count, char **words) {
    MPI_Init(&count, &words);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    FILE *line = dial(getenv("MESH_BENCH_SOCKET"));
    fprintf(line, "%d -\n", rank);
    fflush(line);

    static char order[ORDER_BYTES_MAX];
    static size_t tensors[TENSORS_MAX];
    float *gradients = NULL, *sums = NULL;
    size_t room = 0;
    /* An order is a form, `in-place` or `second`, how often to do all all-reduces, and how many f32 each takes. */
    while (fgets(order, sizeof order, line) != NULL) {
        char *word = strtok(order, " \n");
        if (word == NULL) continue;
        int in_place = strcmp(word, "in-place") == 0;
        if ((word = strtok(NULL, " \n")) == NULL) fail("order");
        int repeats = atoi(word);
        size_t all = 0;
        int parts = 0;
        while ((word = strtok(NULL, " \n")) != NULL && parts < TENSORS_MAX) {
            tensors[parts] = strtoull(word, NULL, 10);
            all += tensors[parts++];
        }
        if (all > room) {
            free(gradients), free(sums);
            room = all;
            gradients = malloc(room * sizeof *gradients), sums = malloc(room * sizeof *sums);
            if (gradients == NULL || sums == NULL) fail("malloc");
            memset(sums, 0, room * sizeof *sums);
        }
        for (size_t i = 0; i < all; i++) gradients[i] = (float)(rank + 1);
        /* A rank that was early may sleep in the first barrier; after the second all are awake. */
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Barrier(MPI_COMM_WORLD);
        double begun = now();
        for (int repeat = 0; repeat < repeats; repeat++) {
            size_t at = 0;
            for (int part = 0; part < parts; at += tensors[part++]) {
                void *from = in_place ? MPI_IN_PLACE : gradients + at;
                MPI_Allreduce(from, (in_place ? gradients : sums) + at, (int)tensors[part], MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            }
        }
        double seconds = (now() - begun) / repeats;
        const float *result = in_place ? gradients : sums;
        /* In place each repetition sums what the one before has left. */
        float expected = (float)(ranks * (ranks + 1) / 2);
        for (int repeat = 1; in_place && repeat < repeats; repeat++) expected *= (float)ranks;
        int right = 1;
        for (size_t i = 0; i < all; i++) right &= result[i] >= expected * 0.9999f && result[i] <= expected * 1.0001f;
        fprintf(line, "%.9f %s\n", seconds, right ? "right" : "wrong");
        fflush(line);
    }
    MPI_Finalize();
    return 0;
}
