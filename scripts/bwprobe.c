// Prints the memory bandwidth in GB/s (1e9 bytes per second) that T threads reach in reading 256 MiB: best of 8 passes.
// usage: bwprobe [T]   (default 2)
// Run beside every decode measurement: on a shared host the bandwidth of a guest can change by a factor within minutes.
// build: gcc -O3 -march=native -fopenmp bwprobe.c -o bwprobe
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 256 << 20, PASSES = 8, LANES = 8 };

int main(int argc, char **argv) {
    const int threads = argc > 1 ? atoi(argv[1]) : 2;
    uint64_t *data = aligned_alloc(2 << 20, BYTES); // huge-page alignment
    if (threads < 1 || !data) {
        fprintf(stderr, "bwprobe: bad thread count or no memory\n");
        return 1;
    }
    memset(data, 1, BYTES);
    const size_t words = BYTES / sizeof *data;
    double best = 0;
    uint64_t sink = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        const double start = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(^ : sink)
        {
            // Independent lanes, so that the loop is limited by loads and not by a chain of XORs.
            uint64_t lane[LANES] = {0};
            const size_t share = words / threads / LANES * LANES;
            const uint64_t *p = data + share * omp_get_thread_num();
            for (size_t i = 0; i < share; i += LANES)
                for (int l = 0; l < LANES; l++) lane[l] ^= p[i + l];
            for (int l = 0; l < LANES; l++) sink ^= lane[l];
        }
        const double rate = BYTES / (omp_get_wtime() - start) / 1e9;
        if (rate > best) best = rate;
    }
    printf("%.1f\n", best);
    return sink == 1; // uses the sum, so that the compiler keeps the reads
}
