#include <mpi.h>

/* An MPI that takes one thread at a time, whatever it is asked for. */
int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  int wanted = required < MPI_THREAD_SERIALIZED ? required : MPI_THREAD_SERIALIZED;
  return PMPI_Init_thread(argc, argv, wanted, provided);
}
