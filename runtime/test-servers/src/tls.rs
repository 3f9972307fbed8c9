//! Certificates for tests of encrypted connections.

use std::{path::PathBuf, sync::Arc};

use tempfile::TempDir;

/// A certificate authority with a server certificate (for `127.0.0.1` and `localhost`) and a client certificate, as PEM
/// files that last as long as this value or a copy of it.
///
/// Two of them trust each other as little as strangers do: use a second one to see a certificate refused.
#[derive(Clone, Debug)]
pub struct Tls {
    directory: Arc<TempDir>,
}

impl Tls {
    /// The authority's certificate: `sslrootcert`.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.directory.path().join("root.crt")
    }

    /// The server's certificate.
    #[must_use]
    pub fn server_certificate(&self) -> PathBuf {
        self.directory.path().join("server.crt")
    }

    /// The server's key.
    #[must_use]
    pub fn server_key(&self) -> PathBuf {
        self.directory.path().join("server.key")
    }

    /// The client's certificate: `sslcert`.
    #[must_use]
    pub fn client_certificate(&self) -> PathBuf {
        self.directory.path().join("client.crt")
    }

    /// The client's key: `sslkey`.
    #[must_use]
    pub fn client_key(&self) -> PathBuf {
        self.directory.path().join("client.key")
    }
}

#[cfg(feature = "client")]
mod make {
    use std::{fs, os::unix::fs::OpenOptionsExt, path::Path, sync::Arc};

    use std::io::Write;

    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
    };

    use super::Tls;
    use crate::Error;

    impl Tls {
        /// Makes all of it. The client's certificate is for this user of the database.
        pub fn new(client: &str) -> Result<Self, Error> {
            make(client, &["localhost", "127.0.0.1"], false).map_err(|error| Error::new("make certificates", error))
        }

        /// The same, but the server's certificate is for these hosts, or is out of date.
        pub fn with_server(client: &str, hosts: &[&str], expired: bool) -> Result<Self, Error> {
            make(client, hosts, expired).map_err(|error| Error::new("make certificates", error))
        }
    }

    fn make(client: &str, hosts: &[&str], expired: bool) -> Result<Tls, Box<dyn std::error::Error>> {
        let directory = tempfile::Builder::new().prefix("warp-test-tls-").tempdir()?;
        let tls = Tls { directory: Arc::new(directory) };

        let mut params = named("warp test authority", &[])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate()?;
        write(&tls.root(), &params.self_signed(&key)?.pem())?;
        let authority = Issuer::new(params, key);

        let mut server = named("localhost", hosts)?;
        if expired {
            (server.not_before, server.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
        }
        let server = (server, ExtendedKeyUsagePurpose::ServerAuth);
        let client = (named(client, &[])?, ExtendedKeyUsagePurpose::ClientAuth);
        for ((mut params, usage), certificate, key_file) in
            [(server, tls.server_certificate(), tls.server_key()), (client, tls.client_certificate(), tls.client_key())]
        {
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate()?;
            write(&certificate, &params.signed_by(&key, &authority)?.pem())?;
            write(&key_file, &key.serialize_pem())?;
        }
        Ok(tls)
    }

    fn named(name: &str, hosts: &[&str]) -> Result<CertificateParams, rcgen::Error> {
        let mut params = CertificateParams::new(hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>())?;
        params.distinguished_name.push(DnType::CommonName, name);
        Ok(params)
    }

    /// Clients refuse a key that others could read.
    fn write(path: &Path, text: &str) -> std::io::Result<()> {
        fs::File::options().create_new(true).write(true).mode(0o600).open(path)?.write_all(text.as_bytes())
    }
}
