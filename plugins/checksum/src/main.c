/*
 * The component: reads one file below /in in pieces, reports how far it is, and returns the digest.
 *
 * Memory stays the same whatever the file's size. It deliberately keeps nothing between attempts; every attempt
 * gets a fresh instance, so the buffers may be static.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../gen/handler.h"
#include "json.h"
#include "sha256.h"

#define FOLDER "/in/"
#define NAME_CAP 4096
/* As much as a host hands out at once; a larger buffer stays partly empty. */
#define CHUNK (64 * 1024)

static uint8_t chunk[CHUNK];
static char name[NAME_CAP];
static char path[sizeof FOLDER + NAME_CAP];
static char message[sizeof path + 256];
static char quoted[6 * NAME_CAP + 3];
static char result[sizeof quoted + 160];

__attribute__((format(printf, 3, 4))) static bool fail(handler_failure_t *failure, uint8_t tag, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    failure->tag = tag;
    /* Both cases carry a string in the same place. */
    handler_string_dup(&failure->val.permanent, message);
    return false;
}

#define PERMANENT WARP_JOB_TYPES_FAILURE_PERMANENT
#define RETRYABLE WARP_JOB_TYPES_FAILURE_RETRYABLE

static void report(uint64_t done, uint64_t total) {
    handler_string_t what;
    handler_string_set(&what, "sha256");
    warp_job_progress_report(&what, total == 0 ? 100.0f : (float)((double)done * 100.0 / (double)total));
}

/* The host refuses a path that leaves the folder anyway. Checked here too, so that the failure names the field. */
static bool inside(const char *relative) {
    if (relative[0] == '\0' || strchr(relative, '\\') != NULL) return false;
    for (const char *part = relative;; ) {
        size_t len = strcspn(part, "/");
        if (len == 0 || (len == 1 && part[0] == '.') || (len == 2 && part[0] == '.' && part[1] == '.')) return false;
        if (part[len] == '\0') return true;
        part += len + 1;
    }
}

/* What may be gone in a minute. Everything else about opening a file is a mistake in the payload or the grant. */
static uint8_t kind_of(int error) {
    switch (error) {
    case EIO: case EAGAIN: case EBUSY: case EINTR: case EMFILE: case ENFILE: case ENOMEM: case ESTALE: case ETIMEDOUT:
        return RETRYABLE;
    default:
        return PERMANENT;
    }
}

static bool digest(int fd, const struct stat *before, char hex[SHA256_HEX_LEN + 1], handler_failure_t *failure) {
    struct sha256 sha;
    uint64_t total = (uint64_t)before->st_size, reported = 0;
    sha256_start(&sha);
    report(0, total == 0 ? 1 : total);

    for (;;) {
        ssize_t n = read(fd, chunk, CHUNK);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            return fail(failure, RETRYABLE, "failed to read %s after %llu bytes: %s", path,
                        (unsigned long long)sha.bytes, strerror(errno));
        }
        if (n == 0) break;
        sha256_update(&sha, chunk, (size_t)n);

        if (warp_job_cancellation_cancelled()) {
            return fail(failure, RETRYABLE, "stopped on request after %llu bytes", (unsigned long long)sha.bytes);
        }
        /* One report per percent is all that anybody can see. */
        if (sha.bytes - reported > total / 100) {
            reported = sha.bytes;
            report(reported, total > reported ? total : reported);
        }
    }

    /* A file that grew or was rewritten meanwhile has been read half old, half new: no such content ever existed. */
    struct stat after;
    if (fstat(fd, &after) != 0) {
        return fail(failure, RETRYABLE, "failed to look at %s again: %s", path, strerror(errno));
    }
    if (sha.bytes != total || after.st_size != before->st_size || after.st_mtim.tv_sec != before->st_mtim.tv_sec ||
        after.st_mtim.tv_nsec != before->st_mtim.tv_nsec) {
        return fail(failure, RETRYABLE, "%s changed while it was read", path);
    }
    sha256_finish_hex(&sha, hex);
    report(1, 1);
    return true;
}

bool exports_handler_handle(handler_attempt_t *attempt, handler_option_string_t *ret, handler_failure_t *failure) {
    struct json_error error =
        json_string_field((const char *)attempt->payload.ptr, attempt->payload.len, "file", name, sizeof name);
    handler_attempt_free(attempt);
    if (error.reason != NULL) {
        return fail(failure, PERMANENT, "failed to read the field file from the payload: %s, at byte %zu", error.reason, error.at);
    }
    if (!inside(name)) {
        return fail(failure, PERMANENT, "file must be a path below the folder in, without empty parts, . or ..: %s", name);
    }
    snprintf(path, sizeof path, "%s%s", FOLDER, name);

    int fd = open(path, O_RDONLY);
    if (fd < 0) return fail(failure, kind_of(errno), "failed to open %s: %s", path, strerror(errno));

    struct stat before;
    char hex[SHA256_HEX_LEN + 1];
    bool ok;
    if (fstat(fd, &before) != 0) {
        ok = fail(failure, RETRYABLE, "failed to look at %s: %s", path, strerror(errno));
    } else if (!S_ISREG(before.st_mode)) {
        ok = fail(failure, PERMANENT, "%s is not a regular file", path);
    } else {
        ok = digest(fd, &before, hex, failure);
    }
    close(fd);
    if (!ok) return false;

    json_quote(name, quoted);
    snprintf(result, sizeof result, "{\"file\":%s,\"bytes\":%llu,\"sha256\":\"%s\"}", quoted,
             (unsigned long long)before.st_size, hex);
    ret->is_some = true;
    handler_string_dup(&ret->val, result);
    return true;
}
