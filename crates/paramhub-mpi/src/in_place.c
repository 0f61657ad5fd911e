#include <mpi.h>

/* A cast in a macro, another one in every MPI: bindgen has no value for it. */
const void *paramhub_mpi_in_place(void) { return MPI_IN_PLACE; }
