/* A slow and lossy link between two network namespaces, for kernels without netem: packets of one side's tun device come
 * out of the other's so many milliseconds later, but for some that are lost.
 *
 *   slow_link NAMESPACE NAMESPACE DEVICE DELAY_MS LOST_PER_THOUSAND
 *
 * It says "ready" once both devices are there, and ends with its standard input. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1 << 14, LONGEST = 2048 };

struct packet {
    int64_t due;
    int length;
    char bytes[LONGEST];
};

/* What is on its way from one side to the other, in order. */
struct way {
    int from, to;
    unsigned first, count;
    struct packet *packets;
};

static void give_up(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static int device_in(const char *name, const char *device) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int netns = open(path, O_RDONLY | O_CLOEXEC);
    if (netns < 0 || setns(netns, CLONE_NEWNET) < 0) give_up(path);
    close(netns);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    snprintf(request.ifr_name, IFNAMSIZ, "%s", device);
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request) < 0) give_up("/dev/net/tun");
    return tun;
}

static void take(struct way *way, int delay, int lost) {
    static char nowhere[LONGEST];
    for (;;) {
        struct packet *last = &way->packets[(way->first + way->count) % MOST];
        int full = way->count == MOST || random() % 1000 < lost;
        ssize_t length = read(way->from, full ? nowhere : last->bytes, LONGEST);
        if (length <= 0) return;
        if (full) continue;
        last->length = (int)length;
        last->due = now_ms() + delay;
        way->count++;
    }
}

/* Milliseconds until the next packet is due; -1 where there is none. */
static int give(struct way *way) {
    while (way->count > 0) {
        struct packet *next = &way->packets[way->first];
        int64_t left = next->due - now_ms();
        if (left > 0) return (int)left;
        /* A device that is down takes nothing: the packet is lost. */
        if (write(way->to, next->bytes, (size_t)next->length) < 0) {}
        way->first = (way->first + 1) % MOST;
        way->count--;
    }
    return -1;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "slow_link NAMESPACE NAMESPACE DEVICE DELAY_MS LOST_PER_THOUSAND\n");
        return 2;
    }
    int delay = atoi(argv[4]), lost = atoi(argv[5]);
    int a = device_in(argv[1], argv[3]), b = device_in(argv[2], argv[3]);
    struct way ways[2] = {{.from = a, .to = b}, {.from = b, .to = a}};
    for (int at = 0; at < 2; at++) {
        ways[at].packets = malloc(sizeof(struct packet) * MOST);
        if (!ways[at].packets) give_up("memory");
    }
    srandom(42);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct pollfd fds[3] = {{a, POLLIN, 0}, {b, POLLIN, 0}, {0, POLLIN, 0}};
        int there = give(&ways[0]), back = give(&ways[1]);
        int wait = there < 0 ? back : back < 0 || there < back ? there : back;
        if (poll(fds, 3, wait) < 0) continue;
        if (fds[2].revents) {
            char byte;
            if (read(0, &byte, 1) <= 0) return 0;
        }
        take(&ways[0], delay, lost);
        take(&ways[1], delay, lost);
    }
}
