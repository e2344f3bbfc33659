//! Who may ask for what: decided from the headers of a request alone.
//!
//! - On loopback other users can connect, too: a request needs the token. A page elsewhere whose
//!   name resolves to this machine (DNS rebinding) sends its own name: the host must be ours.
//! - A page elsewhere can make a browser send requests that it can't read the answers of: whatever
//!   is not a mere look needs an origin that is the host asked, and a header that only a page from
//!   there can set.
//! - On the Unix socket the peer is this user. The host may be a proxy's.
//!
//! *Invariant:* a request that is not GET or HEAD is let in only with origin and header, however it
//! came.

use std::fmt;
use std::net::SocketAddr;

/// The header that the page sets in every request for a change.
pub(super) const OWN_HEADER: &str = "x-cuda-cluster";

/// What forbids code that is not in our files, connections elsewhere, and frames of other sites.
pub(super) const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; \
     style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'self'";

/// What a visitor on loopback must know.
#[derive(Clone)]
pub(super) struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// A random token.
    pub(super) fn new() -> Result<Self, getrandom::Error> {
        let mut bytes = [0u8; 24];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// A token that was made before; `None` if the text can be guessed, or is no word.
    pub(super) fn known(text: &str) -> Option<Self> {
        let word = text.len() >= 16 && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        word.then(|| Self(text.to_owned()))
    }

    /// Whether a text is the token, compared in constant time.
    pub(super) fn is(&self, text: &str) -> bool {
        blake3::hash(self.0.as_bytes()) == blake3::hash(text.as_bytes())
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// How visitors come in.
#[derive(Clone, Debug)]
pub(super) enum Door {
    /// Over TCP on a loopback address.
    Loopback {
        /// The address.
        address: SocketAddr,
        /// What they must know.
        token: Token,
    },
    /// Over a Unix socket, which accepts this user alone.
    OwnSocket,
}

impl Door {
    /// The link to the page; `None` where the token is not needed.
    pub(super) fn link(&self) -> Option<String> {
        match self {
            Door::Loopback { address, token } => {
                Some(format!("http://{address}/?token={}", token.as_str()))
            }
            Door::OwnSocket => None,
        }
    }

    /// The cookie's name: cookies are shared by all ports of a host.
    pub(super) fn cookie(&self) -> String {
        match self {
            Door::Loopback { address, .. } => format!("cuda-cluster-{}", address.port()),
            Door::OwnSocket => "cuda-cluster".to_owned(),
        }
    }

    fn is_own_host(&self, host: &str) -> bool {
        let Door::Loopback { address, .. } = self else { return true };
        let port = address.port();
        let names = [
            address.to_string(),
            format!("127.0.0.1:{port}"),
            format!("localhost:{port}"),
            format!("[::1]:{port}"),
        ];
        names.iter().any(|name| name.eq_ignore_ascii_case(host))
    }
}

/// A request, as far as it matters here.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Visit<'a> {
    /// Whether it only looks: GET or HEAD.
    pub(super) looks: bool,
    /// The header `Host`.
    pub(super) host: Option<&'a str>,
    /// The header `Origin`.
    pub(super) origin: Option<&'a str>,
    /// Whether it has [`OWN_HEADER`].
    pub(super) own_header: bool,
    /// The token, from the cookie, the header `Authorization`, or the link.
    pub(super) token: Option<&'a str>,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It was sent to a name that is not ours.
    Host,
    /// It has no token, or a wrong one.
    Token,
    /// It comes from a page elsewhere, or does not say from where.
    Origin,
    /// It lacks the header that the page sets.
    Header,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::Host => "this page answers to its own address alone",
            Refusal::Token => "open the link that 'cuda-cluster dashboard' has printed",
            Refusal::Origin => "only the page itself may ask for changes",
            Refusal::Header => "a request for a change needs the header X-Cuda-Cluster",
        })
    }
}

/// Whether a request is let in.
pub(super) fn check(door: &Door, visit: Visit<'_>) -> Result<(), Refusal> {
    let host = visit.host.filter(|host| door.is_own_host(host)).ok_or(Refusal::Host)?;
    if let Door::Loopback { token, .. } = door {
        visit.token.filter(|text| token.is(text)).ok_or(Refusal::Token)?;
    }
    if visit.looks {
        return Ok(());
    }
    let from = visit.origin.and_then(|origin| origin.split_once("://"));
    from.filter(|(_, from)| from.eq_ignore_ascii_case(host)).ok_or(Refusal::Origin)?;
    if visit.own_header { Ok(()) } else { Err(Refusal::Header) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback() -> Door {
        let address = "127.0.0.1:4711".parse().expect("an address");
        Door::Loopback { address, token: Token("abc".to_owned()) }
    }

    fn good<'a>() -> Visit<'a> {
        Visit {
            looks: false,
            host: Some("127.0.0.1:4711"),
            origin: Some("http://127.0.0.1:4711"),
            own_header: true,
            token: Some("abc"),
        }
    }

    #[test]
    fn the_page_itself_is_let_in_by_each_name_of_loopback() {
        for host in ["127.0.0.1:4711", "localhost:4711", "LOCALHOST:4711", "[::1]:4711"] {
            let origin = format!("http://{host}");
            let visit = Visit { host: Some(host), origin: Some(&origin), ..good() };
            assert_eq!(check(&loopback(), visit), Ok(()), "{host}");
        }
    }

    #[test]
    fn a_name_that_was_bound_to_this_machine_elsewhere_is_refused() {
        for host in [None, Some("evil.example:4711"), Some("127.0.0.1"), Some("localhost:80")] {
            for looks in [true, false] {
                let visit = Visit { host, looks, ..good() };
                assert_eq!(check(&loopback(), visit), Err(Refusal::Host), "{host:?}");
            }
        }
    }

    #[test]
    fn nobody_is_let_in_without_the_token() {
        for token in [None, Some(""), Some("ab"), Some("abcd"), Some("ABC")] {
            for looks in [true, false] {
                let visit = Visit { token, looks, ..good() };
                assert_eq!(check(&loopback(), visit), Err(Refusal::Token), "{token:?}");
            }
        }
    }

    #[test]
    fn changes_need_an_origin_and_the_own_header_over_every_door() {
        for door in [loopback(), Door::OwnSocket] {
            let elsewhere =
                [None, Some("null"), Some("http://evil.example"), Some("http://127.0.0.1:8080")];
            for origin in elsewhere {
                let visit = Visit { origin, ..good() };
                assert_eq!(check(&door, visit), Err(Refusal::Origin), "{origin:?}");
            }
            let visit = Visit { own_header: false, ..good() };
            assert_eq!(check(&door, visit), Err(Refusal::Header));
            let look = Visit { looks: true, origin: None, own_header: false, ..good() };
            assert_eq!(check(&door, look), Ok(()), "a look needs neither");
        }
    }

    #[test]
    fn on_the_socket_a_proxy_may_have_any_name_and_needs_no_token() {
        let visit = Visit {
            host: Some("hub.example"),
            origin: Some("https://hub.example"),
            token: None,
            ..good()
        };
        assert_eq!(check(&Door::OwnSocket, visit), Ok(()));
    }

    #[test]
    fn tokens_differ_and_are_not_printed() {
        let (a, b) = (Token::new().expect("random"), Token::new().expect("random"));
        assert!(a.as_str().len() >= 32 && !a.is(b.as_str()) && a.is(a.as_str()));
        assert!(!format!("{a:?}").contains(a.as_str()));
    }
}
