/* An all_reduce of f32 vectors in place, timed as `paceline bench collectives` times its own: ranks start
 * together, the slowest rank's time counts, the median of the laps is printed.
 *
 *   mpicc -O2 all_reduce_mpi.c -o all_reduce_mpi && mpirun -np 2 ./all_reduce_mpi 300 4096 1048576
 *
 * With -DNONBLOCKING by MPI_Iallreduce and MPI_Test, as programs do that compute meanwhile; with -DHUGE_PAGES on
 * huge pages, as Paceline's vectors are: the kernel copies between processes more than twice as fast.
 *
 * Arguments: milliseconds for each size, then the sizes in bytes. One line per size: bytes, microseconds.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    double budget = atof(argv[1]) / 1e3;
    for (int which = 2; which < argc; which++) {
        size_t bytes = strtoull(argv[which], NULL, 10);
        int elements = (int)(bytes / 4);
        size_t room = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        float *data = aligned_alloc(HUGE_PAGE, room);
#ifdef HUGE_PAGES
        madvise(data, room, MADV_HUGEPAGE);
#endif
        for (int i = 0; i < elements; i++) data[i] = (float)(i % 25);
        double lap = 0;
        int laps = 2;
        double *times = NULL;
        for (int phase = 0; phase < 2; phase++) {
            times = realloc(times, sizeof(double) * laps);
            int warm = phase == 0 ? 0 : laps / 8;
            for (int i = -warm; i < laps; i++) {
                if (bytes > (1 << 20)) MPI_Barrier(MPI_COMM_WORLD);
                double began = MPI_Wtime();
#ifdef NONBLOCKING
                MPI_Request request;
                int done = 0;
                MPI_Iallreduce(MPI_IN_PLACE, data, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
                while (!done) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
#else
                MPI_Allreduce(MPI_IN_PLACE, data, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
#endif
                lap = MPI_Wtime() - began;
                if (i >= 0) times[i] = lap;
            }
            if (phase == 0) {
                double fits = budget / (lap > 1e-7 ? lap : 1e-7);
                int wanted = fits < 3 ? 3 : fits > 5000 ? 5000 : (int)fits;
                MPI_Allreduce(&wanted, &laps, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
            }
        }
        MPI_Allreduce(MPI_IN_PLACE, times, laps, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        qsort(times, laps, sizeof(double), ascending);
        if (rank == 0) printf("%zu %.3f\n", bytes, times[laps / 2] * 1e6);
        free(times);
        free(data);
    }
    MPI_Finalize();
    return 0;
}
