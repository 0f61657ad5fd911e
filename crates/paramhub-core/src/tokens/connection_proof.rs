//! How a caller with a token and the manager recognise each other over an encrypted connection, before the
//! caller shows the token itself.
//!
//! Both prove that they know the token's hash. The proofs cover bytes that only the two ends of the connection
//! can derive from its keys (RFC 5705), so nobody in the middle can pass them on.

use super::{Tokens, hash};
use crate::auth::{Fingerprint, Proof, Purpose, StreamSecret};

/// What a token's bearer and the manager both know: the token's hash.
#[derive(Clone, Copy)]
pub struct TokenKey(StreamSecret);

impl TokenKey {
    /// The key of a token.
    pub fn of(token: &str) -> TokenKey {
        TokenKey::of_hash(&hash(token)).expect("a hash has 64 hexadecimal digits")
    }

    fn of_hash(hash: &str) -> Option<TokenKey> {
        hash.parse().ok().map(TokenKey)
    }

    /// The caller's proof over the connection's `exported` bytes.
    pub fn prove_caller(&self, exported: &[u8; 32]) -> Proof {
        self.0.prove(Purpose::TokenCaller, &[exported])
    }

    /// The manager's proof, which tells the fingerprint of its authority, too.
    pub fn prove_manager(&self, exported: &[u8; 32], authority: Fingerprint) -> Proof {
        self.0.prove(Purpose::TokenManager, &[exported, &authority.0])
    }
}

impl Tokens {
    /// The key of the valid token with which the caller of a connection has made this proof.
    pub fn proven(&self, exported: &[u8; 32], proof: &Proof) -> Option<TokenKey> {
        let configured = self.configured.as_ref().filter(|hash| !self.is_revoked(hash));
        let others = self.valid().map(|record| &record.hash);
        let keys = configured.into_iter().chain(others).filter_map(|hash| TokenKey::of_hash(hash));
        keys.into_iter().find(|key| key.prove_caller(exported).matches(proof))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::{CreateToken, TokenRole};
    use crate::tokens::{CONFIGURED, TokenBearer};

    #[test]
    fn only_a_valid_token_proves_a_connection_and_only_that_one() {
        let mut tokens = Tokens::new(Some("first"), Vec::new());
        let admin = TokenBearer { token: Some(CONFIGURED.into()), role: TokenRole::Admin, team: None };
        let request = CreateToken { name: "second".into(), role: TokenRole::Admin, team: None };
        let (second, _) = tokens.create(request, &admin, [7; 36], 1).unwrap();
        let (here, elsewhere) = ([1; 32], [2; 32]);
        for text in ["first", second.as_str()] {
            let key = TokenKey::of(text);
            let found = tokens.proven(&here, &key.prove_caller(&here)).unwrap();
            let (authority, other) = (Fingerprint([3; 32]), Fingerprint([4; 32]));
            let answer = found.prove_manager(&here, authority);
            assert!(answer.matches(&key.prove_manager(&here, authority)));
            assert!(!answer.matches(&key.prove_manager(&here, other)));
            assert!(!answer.matches(&key.prove_caller(&here)), "an echo proves nothing");
            assert!(tokens.proven(&elsewhere, &key.prove_caller(&here)).is_none(), "{text}");
        }
        let key = TokenKey::of("third");
        assert!(tokens.proven(&here, &key.prove_caller(&here)).is_none());
        tokens.revoke(CONFIGURED, 2).unwrap();
        let key = TokenKey::of("first");
        assert!(tokens.proven(&here, &key.prove_caller(&here)).is_none());
    }
}
