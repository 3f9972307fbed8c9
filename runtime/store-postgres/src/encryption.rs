//! What went wrong with TLS, in words: which check failed, and which setting to look at.
//!
//! What must stay true: a fault of encryption is never told as one of the network, and no text advises to check less
//! without saying what that gives up.
//!
//! What it deliberately does not do: check anything. That is the driver's affair; this only reads its answer.

use std::path::Path;

use rustls::{AlertDescription, CertificateError, Error as Tls, InvalidMessage};

/// The sentence for a fault of encryption that the driver reports about `target`; nothing if it is another fault.
pub(crate) fn explain(error: &sqlx::Error, target: &str) -> Option<String> {
    let tls = match error {
        // The handshake's faults come as faults of reading.
        sqlx::Error::Io(error) => error.get_ref()?.downcast_ref::<Tls>()?,
        sqlx::Error::Tls(error) => match error.downcast_ref::<Tls>() {
            Some(tls) => tls,
            None => return Some(before_the_handshake(&error.to_string(), target)),
        },
        _ => return None,
    };
    Some(match tls {
        Tls::InvalidCertificate(why) => certificate(why, target),
        Tls::NoCertificatesPresented => format!("{target} presents no certificate, and sslmode wants to verify one"),
        Tls::AlertReceived(alert) => refused(*alert, target),
        Tls::InvalidMessage(InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion) => {
            format!("{target} says that it speaks TLS and then answers with something else; is that address PostgreSQL's?")
        }
        Tls::PeerIncompatible(why) => no_common_version(&format!("{why:?}"), target),
        Tls::InconsistentKeys(_) => {
            "the client's key (sslkey, `client_key`) does not belong to its certificate (sslcert, `client_cert`)".to_owned()
        }
        other => format!("the TLS handshake with {target} failed ({other})"),
    })
}

/// The driver's own refusals, before or beside the handshake.
fn before_the_handshake(why: &str, target: &str) -> String {
    if why.contains("does not support TLS") {
        return format!(
            "{target} offers no TLS, and sslmode demands it; turn `ssl` on in the server, or set sslmode (`sslmode`) to `prefer` or `disable` \
             where nobody can listen to that network"
        );
    }
    format!("TLS with {target} cannot begin ({why}); check sslrootcert, sslcert and sslkey (`root_cert`, `client_cert`, `client_key`)")
}

/// What this side does not accept about the server's certificate.
fn certificate(why: &CertificateError, target: &str) -> String {
    use CertificateError as Why;
    match why {
        // The second is what another authority of the same name looks like.
        Why::UnknownIssuer | Why::BadSignature => format!(
            "the certificate of {target} is signed by no authority that is trusted here ({why}); give the certificate of the one that signed it \
             with sslrootcert (`root_cert`), if this is the right server"
        ),
        Why::NotValidForName | Why::NotValidForNameContext { .. } => {
            let names = match why {
                Why::NotValidForNameContext { presented, .. } if !presented.is_empty() => names(presented),
                _ => "another name".to_owned(),
            };
            format!(
                "the certificate of {target} does not name that host: it is for {names}; write in the address what the certificate says, or set \
                 sslmode (`sslmode`) to `verify-ca`, which takes any server of that authority for the right one"
            )
        }
        Why::Expired | Why::ExpiredContext { .. } => {
            format!("the certificate of {target} has expired; renew it on the server, or set this machine's clock")
        }
        Why::NotValidYet | Why::NotValidYetContext { .. } => {
            format!("the certificate of {target} is not valid yet; set this machine's clock, or the server's certificate is wrong")
        }
        Why::Revoked => format!("the certificate of {target} has been revoked; replace it on the server"),
        Why::InvalidPurpose | Why::InvalidPurposeContext { .. } => {
            format!("the certificate of {target} is not meant for servers (extended key usage); replace it on the server")
        }
        // An authority's own certificate in the place of one that it signs.
        Why::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => format!(
            "the certificate of {target} is an authority's own, and not one for a server that the authority signed; make one for the server, or \
             set sslmode (`sslmode`) to `require`, which encrypts and trusts whoever answers"
        ),
        other => format!("the certificate of {target} cannot be verified ({other}); see sslmode and sslrootcert (`sslmode`, `root_cert`)"),
    }
}

/// A handful of names.
fn names(presented: &[String]) -> String {
    const SHOWN: usize = 5;
    // As the library writes them: `DnsName("db.example")`.
    let plain = |name: &String| name.split('"').nth(1).unwrap_or(name).to_owned();
    let mut text = presented.iter().take(SHOWN).map(plain).collect::<Vec<_>>().join(", ");
    if presented.len() > SHOWN {
        text.push_str(", …");
    }
    text
}

/// What the server does not accept about this side.
fn refused(alert: AlertDescription, target: &str) -> String {
    use AlertDescription as Alert;
    match alert {
        Alert::CertificateRequired => format!(
            "{target} asks for a client certificate, and none is given; give one with sslcert and sslkey (`client_cert`, `client_key`)"
        ),
        Alert::UnknownCA
        | Alert::BadCertificate
        | Alert::UnsupportedCertificate
        | Alert::CertificateUnknown
        | Alert::CertificateExpired
        | Alert::CertificateRevoked
        | Alert::AccessDenied
        | Alert::DecryptError => format!(
            "{target} does not accept this client's certificate ({alert:?}); sslcert (`client_cert`) must be valid and signed by an authority in \
             the server's ssl_ca_file"
        ),
        Alert::ProtocolVersion | Alert::HandshakeFailure | Alert::InsufficientSecurity => no_common_version(&format!("{alert:?}"), target),
        other => format!("{target} ended the TLS handshake ({other:?}); the server's log says why"),
    }
}

fn no_common_version(why: &str, target: &str) -> String {
    format!(
        "{target} and this program have no kind of TLS in common ({why}); 1.2 and 1.3 are spoken here: see the server's \
         ssl_min_protocol_version, ssl_max_protocol_version and ssl_ciphers"
    )
}

/// The first of the settings' files that cannot be read, in words. Asked after a fault, which does not name the file.
pub(crate) async fn unreadable<'f>(files: impl IntoIterator<Item = (&'static str, &'f Path)>) -> Option<String> {
    for (what, path) in files {
        if let Err(error) = tokio::fs::read(path).await {
            return Some(format!("{what} {} cannot be read ({error}); check its path and rights", path.display()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn said(error: Tls) -> String {
        explain(&sqlx::Error::Io(io::Error::new(io::ErrorKind::InvalidData, error)), "db:5432").expect("a fault of TLS")
    }

    #[test]
    fn each_check_that_fails_is_told_with_the_setting_to_look_at() {
        use CertificateError as Why;
        let presented = ["a.example", "b.example"].map(|name| format!("DnsName(\"{name}\")")).to_vec();
        let expected = rustls::pki_types::ServerName::try_from("db").expect("a name");
        for (error, parts) in [
            (Tls::InvalidCertificate(Why::UnknownIssuer), ["no authority that is trusted here", "`root_cert`"]),
            (Tls::InvalidCertificate(Why::NotValidForNameContext { expected, presented }), ["a.example, b.example;", "`verify-ca`"]),
            (Tls::InvalidCertificate(Why::Expired), ["has expired", "clock"]),
            (Tls::InvalidCertificate(Why::NotValidYet), ["not valid yet", "clock"]),
            (Tls::InvalidCertificate(Why::BadEncoding), ["cannot be verified", "`root_cert`"]),
            (Tls::AlertReceived(AlertDescription::CertificateRequired), ["asks for a client certificate", "`client_key`"]),
            (Tls::AlertReceived(AlertDescription::UnknownCA), ["does not accept this client's certificate", "ssl_ca_file"]),
            (Tls::AlertReceived(AlertDescription::ProtocolVersion), ["in common", "ssl_min_protocol_version"]),
            (Tls::AlertReceived(AlertDescription::InternalError), ["InternalError", "log"]),
            (Tls::InvalidMessage(InvalidMessage::InvalidContentType), ["something else", "PostgreSQL's?"]),
            (Tls::DecryptError, ["handshake", "db:5432"]),
        ] {
            let text = said(error);
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
        let none = explain(&sqlx::Error::Tls("server does not support TLS".into()), "db:5432").expect("a fault of TLS");
        assert!(none.contains("offers no TLS") && none.contains("`prefer`"), "{none}");
    }

    #[test]
    fn a_fault_of_the_network_is_none_of_encryption() {
        for error in [sqlx::Error::Io(io::ErrorKind::ConnectionReset.into()), sqlx::Error::PoolTimedOut] {
            assert_eq!(explain(&error, "db:5432"), None);
        }
    }
}
