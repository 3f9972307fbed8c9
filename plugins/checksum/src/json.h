/*
 * As much JSON as this plugin needs: one string field out of an object, and a string written back.
 *
 * The whole text is checked, not only the part up to the field, so that a cut or doubled payload never passes.
 * Bytes above 127 are passed through: the component boundary lets only valid UTF-8 in.
 */
#ifndef CHECKSUM_JSON_H
#define CHECKSUM_JSON_H

#include <stddef.h>

struct json_error {
    /* Static text; NULL says that all went well. */
    const char *reason;
    /* The byte of the text at which it was noticed. */
    size_t at;
};

/* Copies the value of the top-level string field `name`, NUL-terminated, into `out`. */
struct json_error json_string_field(const char *text, size_t len, const char *name, char *out, size_t out_cap);

/* Writes `text` as a JSON string with its quotes, NUL-terminated, and returns its length; `out` must hold
 * json_quoted_cap(strlen(text)) bytes. */
size_t json_quote(const char *text, char *out);
/* Every character may become six: \u001f. */
static inline size_t json_quoted_cap(size_t len) { return 6 * len + 3; }

#endif
