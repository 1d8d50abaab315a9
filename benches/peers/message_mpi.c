/* A message from rank 0 to rank 1, timed as `paceline bench collectives --op broadcast` times its own: ranks start
 * together, the slower rank's time counts, the median of the laps is printed.
 *
 *   mpicc -O2 message_mpi.c -o message_mpi && mpirun -np 2 ./message_mpi 300 4194304
 *
 * Arguments: milliseconds for each size, then the sizes in bytes. One line per size: bytes, microseconds.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
        int bytes = atoi(argv[which]);
        size_t room = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        char *data = aligned_alloc(HUGE_PAGE, room);
#ifdef HUGE_PAGES
        madvise(data, room, MADV_HUGEPAGE);
#endif
        memset(data, 1, bytes); /* Pages that were never written are all one page of zeros. */
        int laps = 3;
        double *times = NULL, lap = 0;
        for (int phase = 0; phase < 2; phase++) {
            times = realloc(times, sizeof(double) * laps);
            for (int i = 0; i < laps; i++) {
                MPI_Barrier(MPI_COMM_WORLD);
                double began = MPI_Wtime();
                if (rank == 0) MPI_Send(data, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
                if (rank == 1) MPI_Recv(data, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                times[i] = lap = MPI_Wtime() - began;
            }
            if (phase == 0) {
                int wanted = budget / (lap > 1e-7 ? lap : 1e-7);
                wanted = wanted < 3 ? 3 : wanted > 5000 ? 5000 : wanted;
                MPI_Allreduce(&wanted, &laps, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
            }
        }
        MPI_Allreduce(MPI_IN_PLACE, times, laps, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        qsort(times, laps, sizeof(double), ascending);
        if (rank == 0) printf("%d %.3f\n", bytes, times[laps / 2] * 1e6);
        free(times);
        free(data);
    }
    MPI_Finalize();
    return 0;
}
