/* Open MPI's side of compare.py: the median time of a collective on rank 0, in microseconds, with a barrier before each call.
   mpirun -np N collectives OPERATION BYTES SECONDS */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void call(const char *operation, float *in, float *out, int len, int ranks) {
    if (!strcmp(operation, "all_reduce"))
        MPI_Allreduce(MPI_IN_PLACE, out, len, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (!strcmp(operation, "broadcast"))
        MPI_Bcast(in, len, MPI_FLOAT, 0, MPI_COMM_WORLD);
    else if (!strcmp(operation, "all_gather"))
        MPI_Allgather(in, len / ranks, MPI_FLOAT, out, len / ranks, MPI_FLOAT, MPI_COMM_WORLD);
    else
        MPI_Barrier(MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
    enum { WARM_UP = 3, MOST = 2000 };
    static double times[MOST];
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 4) MPI_Abort(MPI_COMM_WORLD, 2);
    int len = atoi(argv[2]) / (int)sizeof(float);
    float *in = malloc((len + 1) * sizeof(float)), *out = malloc((len + 1) * sizeof(float));
    if (!in || !out) MPI_Abort(MPI_COMM_WORLD, 1);
    /* Memory that nobody has written to is one page of zeros. */
    for (int i = 0; i < len; i++) in[i] = out[i] = 1;
    int calls = WARM_UP;
    double median = 0;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < calls; i++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double began = MPI_Wtime();
            call(argv[1], in, out, len, ranks);
            times[i] = MPI_Wtime() - began;
        }
        qsort(times, calls, sizeof *times, by_size);
        median = times[calls / 2];
        double wanted = atof(argv[3]) / (median > 1e-9 ? median : 1e-9);
        calls = wanted < 5 ? 5 : wanted > MOST ? MOST : (int)wanted;
        MPI_Bcast(&calls, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
    if (rank == 0) printf("%.2f\n", median * 1e6);
    MPI_Finalize();
    return 0;
}
