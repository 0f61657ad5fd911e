//! The tokens that operators and hubs show to the connection manager: who has one, for what, and which are
//! revoked. Times and random bytes are passed in.
//!
//! A manager starts with one token from its configuration, or with none; then every caller is admitted. Further
//! tokens are made and revoked while jobs run. Only their hashes are kept.

mod connection_proof;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use crate::service::{CreateToken, ErrorCode, ServiceError, TokenRole, TokenStatus, refusal};

pub use connection_proof::TokenKey;

/// The name of the token in the manager's configuration.
pub const CONFIGURED: &str = "configured";
/// The most tokens that are not revoked.
pub const TOKENS_MAX: usize = 1024;
/// The number of revoked tokens that are listed, the newest.
const REVOKED_MAX: usize = 256;
/// The most bytes of a token's name.
const NAME_BYTES_MAX: usize = 64;
/// Begins every token that a manager has made.
const PREFIX: &str = "pht";

/// A caller that showed a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBearer {
    /// The token's name, for the log; `None` if the manager asks for no token.
    pub token: Option<String>,
    /// What the token is for.
    pub role: TokenRole,
    /// The team whose jobs it is for, if that is its role.
    pub team: Option<String>,
}

/// The record of a token, which the store keeps.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// The digits that name the token in its text.
    pub id: String,
    /// The BLAKE3 hash of the token's text, in hexadecimal digits.
    pub hash: String,
    /// The token as listings show it.
    pub status: TokenStatus,
}

/// Whoever knows a token's hash can pose as the manager to its bearers, so it stays out of logs.
impl fmt::Debug for TokenRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenRecord")
            .field("id", &self.id)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

/// All tokens of a manager.
#[derive(Clone, Default)]
pub struct Tokens {
    /// The hash of the configured token.
    configured: Option<String>,
    records: BTreeMap<String, TokenRecord>,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("records", &self.records).finish_non_exhaustive()
    }
}

impl Tokens {
    /// The tokens of a manager that starts with this token in its configuration and these records.
    pub fn new(configured: Option<&str>, records: Vec<TokenRecord>) -> Tokens {
        let records = records.into_iter().map(|record| (record.id.clone(), record)).collect();
        Tokens { configured: configured.map(hash), records }
    }

    /// Whether callers need a token. If not, every caller is admitted.
    pub fn are_needed(&self) -> bool {
        self.configured.is_some()
    }

    /// The caller that shows this token.
    ///
    /// # Errors
    /// If a token is needed and this is none, or is revoked.
    pub fn check(&self, given: Option<&str>) -> Result<TokenBearer, ServiceError> {
        let Some(configured) = &self.configured else {
            return Ok(TokenBearer { token: None, role: TokenRole::Admin, team: None });
        };
        let advice = "give it with --admin-token-file, --admin-token or PARAMHUB_ADMIN_TOKEN";
        let refused = |what: &str| Err(refusal(ErrorCode::Unauthorized, format!("{what}: {advice}")));
        let Some(given) = given else {
            return refused(
                "this call needs the connection manager's admin token, or another token of it, as `authorization: Bearer TOKEN`",
            );
        };
        let hashed = hash(given);
        let record = match given.split('-').collect::<Vec<_>>()[..] {
            [PREFIX, id, _] => self.records.get(id).filter(|record| is_same(&record.hash, &hashed)),
            _ => None,
        };
        // The configured token may be revoked, too: then there is a record with its hash.
        let is_configured = is_same(configured, &hashed);
        let revoked = self
            .records
            .values()
            .find(|record| record.status.revoked_at.is_some() && is_same(&record.hash, &hashed));
        match (revoked, record, is_configured) {
            (Some(record), ..) => {
                let name = &record.status.name;
                let message =
                    format!("the token `{name}` was revoked: ask the manager's operator for another");
                Err(refusal(ErrorCode::Unauthorized, message))
            }
            (None, Some(record), _) => {
                let TokenStatus { name, role, team, .. } = record.status.clone();
                if (role == TokenRole::Team) != team.is_some() {
                    // Without its team it would open the jobs of all.
                    return refused(&format!("the record of the token `{name}` is damaged"));
                }
                Ok(TokenBearer { token: Some(name), role, team })
            }
            (None, None, true) => {
                Ok(TokenBearer { token: Some(CONFIGURED.to_owned()), role: TokenRole::Admin, team: None })
            }
            (None, None, false) => {
                refused("this is not the connection manager's admin token, nor another token of it")
            }
        }
    }

    /// Makes a token. Returns its text, which is shown once, and its record.
    ///
    /// # Errors
    /// If the manager asks for no token, the name is unusable or taken, there are too many, or a team is missing
    /// or superfluous. Whether there is such a team is for the caller to check.
    pub fn create(
        &mut self,
        request: CreateToken,
        by: &TokenBearer,
        random: [u8; 36],
        unix_s: u64,
    ) -> Result<(String, TokenRecord), ServiceError> {
        let CreateToken { name, role, team } = request;
        let refuse = |code, message: String| Err(refusal(code, message));
        if self.configured.is_none() {
            let message = "this connection manager admits every caller without a token: start it with --admin-token-file first";
            return refuse(ErrorCode::BadRequest, message.to_owned());
        }
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !(1..=NAME_BYTES_MAX).contains(&name.len()) || !name.bytes().all(allowed) {
            let shown: String = name.chars().take(NAME_BYTES_MAX).collect();
            return refuse(
                ErrorCode::BadRequest,
                format!(
                    "{shown:?} is no token's name: it must have 1 to {NAME_BYTES_MAX} letters, digits, `.`, `_` or `-`"
                ),
            );
        }
        if (role == TokenRole::Team) != team.is_some() {
            let message = match role {
                TokenRole::Team => {
                    "a token with the role team needs the name of the team (--team)".to_owned()
                }
                other => format!(
                    "a token with the role {other} is for no team: leave the team out, or make its role team"
                ),
            };
            return refuse(ErrorCode::BadRequest, message);
        }
        if name == CONFIGURED || self.valid().any(|record| record.status.name == name) {
            return refuse(
                ErrorCode::NameTaken,
                format!("there is a token `{name}` already: choose another name, or revoke that one"),
            );
        }
        if self.valid().count() >= TOKENS_MAX {
            return refuse(
                ErrorCode::DoesNotFit,
                format!("there are {TOKENS_MAX} tokens already, the most there can be: revoke some"),
            );
        }
        let (id, secret) = random.split_at(4);
        let id = hexadecimal(id);
        let text = format!("{PREFIX}-{id}-{}", hexadecimal(secret));
        let status = TokenStatus {
            name,
            role,
            team,
            created_at: unix_s,
            created_by: by.token.clone().unwrap_or_default(),
            revoked_at: None,
        };
        let record = TokenRecord { id: id.clone(), hash: hash(&text), status };
        self.records.insert(id, record.clone());
        Ok((text, record))
    }

    /// Revokes a token by its name. Calls that are under way go on; the next is refused. Returns its record, and
    /// the ids of records that are forgotten.
    ///
    /// # Errors
    /// If there is no such token, or no other one could make tokens.
    pub fn revoke(&mut self, name: &str, unix_s: u64) -> Result<(TokenRecord, Vec<String>), ServiceError> {
        let found = self.valid().find(|record| record.status.name == name).map(|record| record.id.clone());
        let configured = self.configured.as_ref().filter(|_| name == CONFIGURED);
        let configured = configured.filter(|hash| !self.is_revoked(hash)).cloned();
        if found.is_none() && configured.is_none() {
            let message = format!("there is no token `{name}` that is not revoked");
            return Err(refusal(ErrorCode::NotFound, message));
        }
        if !self.admins().any(|other| other != name) {
            let message = format!(
                "the token `{name}` is the last with which tokens can be made: make another with `paramhub tokens create \
                 NAME --role admin` first"
            );
            return Err(refusal(ErrorCode::Busy, message));
        }
        let record = match (found, configured) {
            (Some(id), _) => {
                let record = self.records.get_mut(&id).expect("it was just found");
                record.status.revoked_at = Some(unix_s);
                record.clone()
            }
            (None, configured) => {
                let hash = configured.expect("one of both was found");
                let status = TokenStatus {
                    name: CONFIGURED.to_owned(),
                    role: TokenRole::Admin,
                    team: None,
                    created_at: unix_s,
                    created_by: String::new(),
                    revoked_at: Some(unix_s),
                };
                // The id is no token's: those have eight digits.
                let record = TokenRecord { id: format!("{CONFIGURED}-{hash}"), hash, status };
                self.records.insert(record.id.clone(), record.clone());
                record
            }
        };
        Ok((record, self.forget_old()))
    }

    /// Every token as listings show it: the configured one, then the others by the time of their making.
    pub fn statuses(&self) -> Vec<TokenStatus> {
        let configured =
            self.configured.as_ref().filter(|hash| !self.is_revoked(hash)).map(|_| TokenStatus {
                name: CONFIGURED.to_owned(),
                role: TokenRole::Admin,
                team: None,
                created_at: 0,
                created_by: String::new(),
                revoked_at: None,
            });
        let mut others: Vec<TokenStatus> =
            self.records.values().map(|record| record.status.clone()).collect();
        others.sort_by(|a, b| (a.created_at, &a.name).cmp(&(b.created_at, &b.name)));
        configured.into_iter().chain(others).collect()
    }

    /// The names of a team's valid tokens.
    pub fn of_team(&self, team: &str) -> impl Iterator<Item = &str> {
        let of_team = self.valid().filter(move |record| record.status.team.as_deref() == Some(team));
        of_team.map(|record| record.status.name.as_str())
    }

    fn valid(&self) -> impl Iterator<Item = &TokenRecord> {
        self.records.values().filter(|record| record.status.revoked_at.is_none())
    }

    fn is_revoked(&self, hash: &str) -> bool {
        self.records.values().any(|record| record.hash == hash && record.status.revoked_at.is_some())
    }

    /// The names of the tokens that may make others.
    fn admins(&self) -> impl Iterator<Item = &str> {
        let configured = self.configured.as_ref().filter(|hash| !self.is_revoked(hash)).map(|_| CONFIGURED);
        let others = self.valid().filter(|record| record.status.role == TokenRole::Admin);
        configured.into_iter().chain(others.map(|record| record.status.name.as_str()))
    }

    /// Drops the oldest revoked tokens beyond those that are listed. The configured token's stays, since it would
    /// be valid again.
    fn forget_old(&mut self) -> Vec<String> {
        let mut revoked: Vec<(u64, String)> = self
            .records
            .values()
            .filter(|record| record.status.name != CONFIGURED)
            .filter_map(|record| Some((record.status.revoked_at?, record.id.clone())))
            .collect();
        revoked.sort();
        let old = revoked.len().saturating_sub(REVOKED_MAX);
        let old: Vec<String> = revoked.into_iter().take(old).map(|(_, id)| id).collect();
        old.iter().for_each(|id| drop(self.records.remove(id)));
        old
    }
}

/// The hash under which a token is kept.
pub(crate) fn hash(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

pub(crate) fn is_same(one: &str, other: &str) -> bool {
    one.as_bytes().ct_eq(other.as_bytes()).into()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "the-first-token";

    fn admin() -> TokenBearer {
        TokenBearer { token: Some(CONFIGURED.into()), role: TokenRole::Admin, team: None }
    }

    fn create(tokens: &mut Tokens, name: &str, role: TokenRole) -> Result<String, ServiceError> {
        let number = tokens.records.len() as u8;
        tokens.create(of(name, role), &admin(), [number; 36], 1000 + u64::from(number)).map(|(text, _)| text)
    }

    fn of(name: &str, role: TokenRole) -> CreateToken {
        CreateToken { name: name.into(), role, team: None }
    }

    fn code<T: std::fmt::Debug>(result: Result<T, ServiceError>) -> ErrorCode {
        result.unwrap_err().code
    }

    #[test]
    fn a_manager_without_a_configured_token_admits_everyone_and_makes_none() {
        let mut open = Tokens::new(None, Vec::new());
        for given in [None, Some("anything")] {
            assert_eq!(
                open.check(given).unwrap(),
                TokenBearer { token: None, role: TokenRole::Admin, team: None }
            );
        }
        assert_eq!(code(create(&mut open, "x", TokenRole::Reader)), ErrorCode::BadRequest);
        assert!(open.statuses().is_empty());
    }

    #[test]
    fn a_token_admits_its_bearer_until_it_is_revoked() {
        let mut tokens = Tokens::new(Some(FIRST), Vec::new());
        assert_eq!(tokens.check(Some(FIRST)).unwrap(), admin());
        let text = create(&mut tokens, "grafana", TokenRole::Reader).unwrap();
        let bearer = tokens.check(Some(&text)).unwrap();
        assert_eq!((bearer.token.as_deref(), bearer.role), (Some("grafana"), TokenRole::Reader));
        for wrong in ["", "pht", &text[..text.len() - 1], &text.replace('0', "1"), "pht-00000000-", "x"] {
            assert_eq!(code(tokens.check(Some(wrong))), ErrorCode::Unauthorized, "{wrong}");
        }
        assert_eq!(code(tokens.check(None)), ErrorCode::Unauthorized);
        assert_eq!(code(create(&mut tokens, "grafana", TokenRole::Reader)), ErrorCode::NameTaken);
        tokens.revoke("grafana", 2000).unwrap();
        let refused = tokens.check(Some(&text)).unwrap_err();
        assert!(refused.message.contains("the token `grafana` was revoked"), "{}", refused.message);
        assert_eq!(code(tokens.revoke("grafana", 2000)), ErrorCode::NotFound);
        let again = create(&mut tokens, "grafana", TokenRole::Reader).unwrap();
        assert!(tokens.check(Some(&again)).is_ok() && tokens.check(Some(&text)).is_err());
    }

    #[test]
    fn the_configured_token_can_be_replaced_and_stays_revoked_over_a_restart() {
        let mut tokens = Tokens::new(Some(FIRST), Vec::new());
        assert_eq!(code(tokens.revoke(CONFIGURED, 2000)), ErrorCode::Busy, "it is the last");
        create(&mut tokens, "reads", TokenRole::Reader).unwrap();
        assert_eq!(code(tokens.revoke(CONFIGURED, 2000)), ErrorCode::Busy, "a reader makes no tokens");
        let next = create(&mut tokens, "second", TokenRole::Admin).unwrap();
        tokens.revoke(CONFIGURED, 2000).unwrap();
        assert_eq!(code(tokens.revoke("second", 2000)), ErrorCode::Busy);
        let mut restarted = Tokens::new(Some(FIRST), tokens.records.values().cloned().collect());
        for tokens in [&tokens, &restarted] {
            assert_eq!(code(tokens.check(Some(FIRST))), ErrorCode::Unauthorized);
            assert_eq!(tokens.check(Some(&next)).unwrap().role, TokenRole::Admin);
        }
        // With another token in its configuration the manager has that one as well.
        restarted = Tokens::new(Some("a-new-one"), restarted.records.values().cloned().collect());
        assert!(restarted.check(Some("a-new-one")).is_ok() && restarted.check(Some(FIRST)).is_err());
    }

    #[test]
    fn tokens_of_a_team_name_it_and_those_of_an_earlier_release_name_none() {
        let mut tokens = Tokens::new(Some(FIRST), Vec::new());
        let of_team = |name: &str, role, team: Option<&str>| CreateToken {
            team: team.map(str::to_owned),
            ..of(name, role)
        };
        for wrong in [
            of_team("alice", TokenRole::Team, None),
            of_team("alice", TokenRole::Admin, Some("vision")),
            of_team("alice", TokenRole::Reader, Some("vision")),
        ] {
            assert_eq!(code(tokens.create(wrong, &admin(), [1; 36], 0)), ErrorCode::BadRequest);
        }
        for (number, name) in [(1, "alice"), (2, "bob")] {
            let request = of_team(name, TokenRole::Team, Some("vision"));
            let (text, record) = tokens.create(request, &admin(), [number; 36], 0).unwrap();
            let bearer = tokens.check(Some(&text)).unwrap();
            assert_eq!((bearer.role, bearer.team.as_deref()), (TokenRole::Team, Some("vision")));
            let stored = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<TokenRecord>(&stored).unwrap(), record);
        }
        let (text, mut damaged) =
            tokens.create(of_team("carol", TokenRole::Team, Some("vision")), &admin(), [3; 36], 0).unwrap();
        damaged.status.team = None;
        assert_eq!(code(Tokens::new(Some(FIRST), vec![damaged]).check(Some(&text))), ErrorCode::Unauthorized);
        tokens.revoke("carol", 1).unwrap();
        tokens.revoke("alice", 1).unwrap();
        assert_eq!(tokens.of_team("vision").collect::<Vec<_>>(), ["bob"]);
        assert_eq!(tokens.of_team("speech").count(), 0);
        let earlier = r#"{"id":"00","hash":"11","status":{"name":"x","role":"reader","created_at":1,"created_by":"y"}}"#;
        assert_eq!(serde_json::from_str::<TokenRecord>(earlier).unwrap().status.team, None);
    }

    #[test]
    fn names_are_plain_and_few() {
        let mut tokens = Tokens::new(Some(FIRST), Vec::new());
        for wrong in ["", "a b", "a\n", CONFIGURED, &"x".repeat(65)] {
            assert!(create(&mut tokens, wrong, TokenRole::Hub).is_err(), "{wrong:?}");
        }
        for number in 0..TOKENS_MAX {
            let mut random = [0; 36];
            random[..4].copy_from_slice(&(number as u32).to_le_bytes());
            tokens.create(of(&format!("t{number}"), TokenRole::Hub), &admin(), random, 0).unwrap();
        }
        let full = tokens.create(of("more", TokenRole::Hub), &admin(), [9; 36], 0);
        assert_eq!(code(full), ErrorCode::DoesNotFit);
    }

    #[test]
    fn old_revoked_tokens_are_forgotten() {
        let mut tokens = Tokens::new(Some(FIRST), Vec::new());
        let mut forgotten = Vec::new();
        for number in 0..REVOKED_MAX as u32 + 10 {
            let mut random = [0; 36];
            random[..4].copy_from_slice(&number.to_le_bytes());
            tokens.create(of("t", TokenRole::Hub), &admin(), random, 0).unwrap();
            forgotten.extend(tokens.revoke("t", u64::from(number)).unwrap().1);
        }
        assert_eq!((forgotten.len(), tokens.statuses().len()), (10, 1 + REVOKED_MAX));
    }

    #[test]
    fn listings_show_no_secret() {
        let mut tokens = Tokens::new(Some(FIRST), Vec::new());
        let text = create(&mut tokens, "grafana", TokenRole::Reader).unwrap();
        let shown = serde_json::to_string(&tokens.statuses()).unwrap();
        assert!(!shown.contains(FIRST) && !shown.contains(&text[13..]), "{shown}");
        let kept = format!("{:?}", tokens.records);
        assert!(!kept.contains(&text[13..]), "only hashes are kept");
    }
}
