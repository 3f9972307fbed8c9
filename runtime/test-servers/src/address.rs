//! URLs of servers, taken apart and put together. No more of them than tests use: escapes stay as they are.

/// `postgres://user:password@host:port/database?parameters`; what is absent is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address<'a> {
    scheme: &'a str,
    /// `user` or `user:password`.
    pub(crate) credentials: &'a str,
    pub(crate) host: &'a str,
    database: &'a str,
    pub(crate) parameters: &'a str,
}

impl<'a> Address<'a> {
    pub(crate) fn of(url: &'a str) -> Self {
        let (scheme, rest) = url.split_once("://").unwrap_or(("postgres", url));
        let (place, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, database) = place.split_once('/').unwrap_or((place, ""));
        let (credentials, host) = authority.rsplit_once('@').unwrap_or(("", authority));
        Self { scheme, credentials, host, database, parameters }
    }

    pub(crate) fn with_host(self, host: &str) -> String {
        Address { host, ..self }.url()
    }

    pub(crate) fn with_database(self, database: &str) -> String {
        Address { database, ..self }.url()
    }

    /// `host:port`, with the port that PostgreSQL has when none is named.
    pub(crate) fn host_and_port(self) -> (&'a str, u16) {
        match self.host.rsplit_once(':').map(|(host, port)| (host, port.parse())) {
            Some((host, Ok(port))) => (host, port),
            _ => (self.host, 5432),
        }
    }

    fn url(self) -> String {
        let Self { scheme, credentials, host, database, parameters } = self;
        let at = if credentials.is_empty() { "" } else { "@" };
        let question = if parameters.is_empty() { "" } else { "?" };
        format!("{scheme}://{credentials}{at}{host}/{database}{question}{parameters}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_gets_another_database_or_host() {
        let check = |url, database: &str, host: &str| {
            assert_eq!(Address::of(url).with_database("x"), database);
            assert_eq!(Address::of(url).with_host("h:9"), host);
        };
        check("postgres://u:p@127.0.0.1:1/a", "postgres://u:p@127.0.0.1:1/x", "postgres://u:p@h:9/a");
        check("postgres://u@127.0.0.1:1", "postgres://u@127.0.0.1:1/x", "postgres://u@h:9/");
        check("postgresql://[::1]:1/a", "postgresql://[::1]:1/x", "postgresql://h:9/a");
        check(
            "postgres://u@y/a?sslrootcert=/t/ca&a=b",
            "postgres://u@y/x?sslrootcert=/t/ca&a=b",
            "postgres://u@h:9/a?sslrootcert=/t/ca&a=b",
        );
        check("postgres://y?sslmode=disable", "postgres://y/x?sslmode=disable", "postgres://h:9/?sslmode=disable");
    }

    #[test]
    fn a_port_has_a_default() {
        assert_eq!(Address::of("postgres://u@h:7/").host_and_port(), ("h", 7));
        assert_eq!(Address::of("postgres://u@h").host_and_port(), ("h", 5432));
    }
}
