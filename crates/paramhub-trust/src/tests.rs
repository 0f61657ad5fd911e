//! Handshakes in memory: who is recognised, and what fails.

use std::io::{Read, Write};
use std::time::{Duration, SystemTime};

use paramhub_core::auth::Fingerprint;
use paramhub_core::tokens::Tokens;
use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, Error, ServerConnection};
use std::sync::Arc;

use crate::authority::Authority;
use crate::server::CertificateFiles;
use crate::token_exchange::{ANSWER_BYTES, AnswerError, TokenExchange, answer_token};
use crate::{
    AuthorityRecord, ManagerIdentity, TrustError, caller_by_fingerprint, caller_by_token, manager_name,
    server_name,
};

const DAY: Duration = Duration::from_secs(86_400);

fn authority() -> AuthorityRecord {
    ManagerIdentity::make_authority().unwrap()
}

fn manager(authorities: &[&AuthorityRecord]) -> ManagerIdentity {
    ManagerIdentity::new(authorities.iter().copied().cloned().collect(), Vec::new(), None).unwrap()
}

/// Makes the handshake of a caller with a manager.
fn handshake(
    caller: Arc<ClientConfig>,
    name: ServerName<'static>,
    manager: &ManagerIdentity,
) -> Result<(ClientConnection, ServerConnection), Error> {
    let mut caller = ClientConnection::new(caller, name).unwrap();
    let mut manager = ServerConnection::new(manager.tls()).unwrap();
    while caller.is_handshaking() || manager.is_handshaking() {
        let mut bytes = Vec::new();
        caller.write_tls(&mut bytes).unwrap();
        manager.read_tls(&mut bytes.as_slice()).unwrap();
        manager.process_new_packets()?;
        let mut bytes = Vec::new();
        manager.write_tls(&mut bytes).unwrap();
        caller.read_tls(&mut bytes.as_slice()).unwrap();
        caller.process_new_packets()?;
    }
    Ok((caller, manager))
}

fn recognise(authority: Fingerprint, manager: &ManagerIdentity) -> Result<(), Error> {
    handshake(caller_by_fingerprint(authority), server_name(authority), manager).map(drop)
}

#[test]
fn a_manager_is_recognised_by_its_authority_alone() {
    let (one, other) = (authority(), authority());
    let (manager_of_one, manager_of_other) = (manager(&[&one]), manager(&[&other]));
    recognise(manager_of_one.authority(), &manager_of_one).unwrap();
    let refused = recognise(manager_of_other.authority(), &manager_of_one).unwrap_err();
    assert!(matches!(refused, Error::InvalidCertificate(_)), "{refused:?}");
}

#[test]
fn an_authority_survives_its_record() {
    let manager_before = manager(&[&authority()]);
    let records = manager_before.authorities();
    let manager_after = manager(&[&records[0]]);
    assert_eq!(manager_before.authority(), manager_after.authority());
    recognise(manager_before.authority(), &manager_after).unwrap();
}

#[test]
fn callers_that_know_a_former_authority_are_served_until_it_is_revoked() {
    let (old, new) = (authority(), authority());
    let replaced = manager(&[&old]);
    let former = replaced.authority();
    replaced.replace_authorities(vec![new.clone(), old]).unwrap();
    assert_ne!(replaced.authority(), former);
    for known in [former, replaced.authority()] {
        recognise(known, &replaced).unwrap();
    }
    replaced.replace_authorities(vec![new]).unwrap();
    recognise(replaced.authority(), &replaced).unwrap();
    assert!(recognise(former, &replaced).is_err());
}

/// A certificate of the right authority that is not the manager's, or not valid now, is refused.
#[test]
fn certificates_for_another_name_or_another_time_are_refused() {
    let signer = Authority::restore(authority()).unwrap();
    let fingerprint = signer.fingerprint;
    let now = SystemTime::now();
    let manager_names = || vec!["manager.paramhub.internal".to_owned()];
    let expired = signer.sign_for(manager_names(), now - 120 * DAY).unwrap();
    let early = signer.sign_for(manager_names(), now + 30 * DAY).unwrap();
    let elsewhere = signer.sign_for(vec!["hub-3.paramhub.internal".to_owned()], now).unwrap();
    let right = signer.sign_for(manager_names(), now).unwrap();
    for (name, certificate, is_taken) in [
        ("expired", expired, false),
        ("early", early, false),
        ("elsewhere", elsewhere, false),
        ("right", right, true),
    ] {
        let taken = handshake_with(certificate.key, fingerprint);
        assert_eq!(taken.is_ok(), is_taken, "{name}: {taken:?}");
    }
}

/// The handshake of a server that presents this certificate.
fn handshake_with(certificate: CertifiedKey, authority: Fingerprint) -> Result<(), Error> {
    #[derive(Debug)]
    struct Always(Arc<CertifiedKey>);
    impl rustls::server::ResolvesServerCert for Always {
        fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            Some(self.0.clone())
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Always(Arc::new(certificate))));
    let mut caller = ClientConnection::new(caller_by_fingerprint(authority), server_name(authority)).unwrap();
    let mut server = ServerConnection::new(Arc::new(server)).unwrap();
    while caller.is_handshaking() {
        let mut bytes = Vec::new();
        caller.write_tls(&mut bytes).unwrap();
        server.read_tls(&mut bytes.as_slice()).unwrap();
        server.process_new_packets()?;
        let mut bytes = Vec::new();
        server.write_tls(&mut bytes).unwrap();
        caller.read_tls(&mut bytes.as_slice()).unwrap();
        caller.process_new_packets()?;
    }
    Ok(())
}

/// A stranger's server that copies the public certificates of the manager has no key for them.
#[test]
fn a_copied_certificate_is_worth_nothing_without_its_key() {
    let signer = Authority::restore(authority()).unwrap();
    let names = || vec!["manager.paramhub.internal".to_owned()];
    let copied = signer.sign_for(names(), SystemTime::now()).unwrap().key.cert;
    let strangers = signer.sign_for(names(), SystemTime::now()).unwrap().key.key;
    let refused = handshake_with(CertifiedKey::new(copied, strangers), signer.fingerprint).unwrap_err();
    assert!(matches!(refused, Error::InvalidCertificate(_)), "{refused:?}");
}

fn by_token(manager: &ManagerIdentity) -> (ClientConnection, ServerConnection) {
    handshake(caller_by_token(), manager_name(), manager).unwrap()
}

#[test]
fn the_bearer_of_a_token_learns_the_authority_of_a_manager_that_knows_the_token() {
    let manager = manager(&[&authority()]);
    let tokens = Tokens::new(Some("secret"), Vec::new());
    for (token, expected) in [("secret", Ok(manager.authority())), ("wrong", Err(AnswerError::UnknownToken))]
    {
        let (caller, server) = by_token(&manager);
        let exchange = TokenExchange::new(&caller, token).unwrap();
        let answer = answer_token(&server, &tokens, manager.authority(), exchange.request()).unwrap();
        assert_eq!(exchange.check(&answer), expected, "{token}");
    }
}

/// One in the middle has a connection to each end. It can pass proofs on, but they are of other connections.
#[test]
fn proofs_that_one_in_the_middle_passes_on_are_refused() {
    let (manager, stranger) = (manager(&[&authority()]), manager(&[&authority()]));
    let tokens = Tokens::new(Some("secret"), Vec::new());
    let (caller, stranger_to_caller) = by_token(&stranger);
    let (_stranger_to_manager, server) = by_token(&manager);
    let exchange = TokenExchange::new(&caller, "secret").unwrap();
    let passed_on = answer_token(&server, &tokens, manager.authority(), exchange.request()).unwrap();
    assert_eq!(passed_on, [0; ANSWER_BYTES], "the manager does not take the proof");
    let mut forged = passed_on;
    forged[0] = 1;
    assert_eq!(exchange.check(&forged), Err(AnswerError::WrongProof));
    // The same proof over the caller's own connection is what a true manager would have made.
    let right = answer_token(&stranger_to_caller, &tokens, stranger.authority(), exchange.request()).unwrap();
    assert_eq!(exchange.check(&right), Ok(stranger.authority()));
    let mut other_authority = right;
    other_authority[1] ^= 1;
    assert_eq!(exchange.check(&other_authority), Err(AnswerError::WrongProof));
}

#[test]
fn a_configured_certificate_is_for_programs_that_are_not_of_paramhub() {
    let folder = tempfile::tempdir().unwrap();
    let files =
        CertificateFiles { certificate: folder.path().join("chain.pem"), key: folder.path().join("key.pem") };
    let write = |name: &str| {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate =
            rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(&files.certificate, certificate.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        certificate.der().to_vec()
    };
    let own = authority();
    let open = || ManagerIdentity::new(vec![own.clone()], Vec::new(), Some(files.clone()));
    assert!(matches!(open(), Err(TrustError::File { .. })), "the files are missing");
    let first = write("one.example");
    let manager = open().unwrap();
    let presented = |name: &str| {
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let (caller, _) = handshake(caller_by_token(), name, &manager).unwrap();
        caller.peer_certificates().unwrap()[0].to_vec()
    };
    assert_eq!(presented("one.example"), first);
    assert_ne!(presented("manager.paramhub.internal"), first);
    recognise(manager.authority(), &manager).unwrap();
    // A changed file is taken at the next renewal.
    let second = write("two.example");
    let written = std::fs::File::open(&files.certificate).unwrap();
    written.set_modified(SystemTime::now() - DAY).unwrap();
    manager.renew(SystemTime::now()).unwrap();
    assert_eq!(presented("two.example"), second);
    // A certificate without its key is refused, and the former stays.
    let lone = rcgen::KeyPair::generate().unwrap();
    std::fs::write(&files.key, lone.serialize_pem()).unwrap();
    written.set_modified(SystemTime::now() - 2 * DAY).unwrap();
    assert!(matches!(manager.renew(SystemTime::now()), Err(TrustError::Unmatched { .. })));
    assert_eq!(presented("two.example"), second);
}

#[test]
fn certificates_are_signed_anew_before_they_expire() {
    let manager = manager(&[&authority()]);
    let certificate = || {
        let (caller, _) = by_token(&manager);
        caller.peer_certificates().unwrap()[0].to_vec()
    };
    let first = certificate();
    manager.renew(SystemTime::now() + DAY).unwrap();
    assert_eq!(certificate(), first);
    manager.renew(SystemTime::now() + 31 * DAY).unwrap();
    assert_ne!(certificate(), first);
}

#[test]
fn names_of_the_machine_are_in_the_certificate_and_wrong_ones_refused() {
    let own = authority();
    let names = vec!["head.example".to_owned(), "10.1.2.3".to_owned()];
    let manager = ManagerIdentity::new(vec![own.clone()], names, None).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(rustls::pki_types::CertificateDer::from_pem_slice(own.certificate.as_bytes()).unwrap())
        .unwrap();
    let curl = Arc::new(
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth(),
    );
    for (name, is_taken) in
        [("head.example", true), ("10.1.2.3", true), ("localhost", true), ("other.example", false)]
    {
        let name = ServerName::try_from(name.to_owned()).unwrap();
        assert_eq!(handshake(curl.clone(), name.clone(), &manager).is_ok(), is_taken, "{name:?}");
    }
    for wrong in ["a b", "", "http://x"] {
        let refused = ManagerIdentity::new(vec![own.clone()], vec![wrong.to_owned()], None).unwrap_err();
        assert!(matches!(refused, TrustError::Name { .. }), "{refused}");
    }
}

/// Nothing but TLS 1.3 is spoken: an older client gets an alert.
#[test]
fn an_older_version_of_tls_is_refused() {
    let manager = manager(&[&authority()]);
    let mut server = ServerConnection::new(manager.tls()).unwrap();
    // A ClientHello of TLS 1.2 as openssl sends it, without the extension that offers newer versions.
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    // The suite ECDHE-ECDSA-AES128-GCM-SHA256; the extensions are the groups, the forms of points, and the signatures.
    body.extend([0, 0, 2, 0xc0, 0x2b, 1, 0, 0, 22]);
    body.extend([0, 10, 0, 4, 0, 2, 0, 23, 0, 11, 0, 2, 1, 0, 0, 13, 0, 4, 0, 2, 4, 3]);
    let mut hello = vec![1, 0, 0, body.len() as u8];
    hello.extend(body);
    let mut record = vec![22, 3, 1, 0, hello.len() as u8];
    record.extend(hello);
    server.read_tls(&mut record.as_slice()).unwrap();
    let refused = server.process_new_packets().unwrap_err();
    let expected = rustls::PeerIncompatible::SupportedVersionsExtensionRequired;
    assert_eq!(refused, Error::PeerIncompatible(expected));
    let mut alert = Vec::new();
    server.write_tls(&mut alert).unwrap();
    assert_eq!((alert[0], server.is_handshaking()), (21, true));
}

/// What follows a handshake goes both ways.
#[test]
fn bytes_pass_after_the_handshake() {
    let manager = manager(&[&authority()]);
    let (mut caller, mut server) = by_token(&manager);
    caller.writer().write_all(b"hello").unwrap();
    let mut bytes = Vec::new();
    caller.write_tls(&mut bytes).unwrap();
    assert!(!bytes.windows(5).any(|window| window == b"hello"));
    server.read_tls(&mut bytes.as_slice()).unwrap();
    server.process_new_packets().unwrap();
    let mut received = [0; 5];
    server.reader().read_exact(&mut received).unwrap();
    assert_eq!(&received, b"hello");
}
