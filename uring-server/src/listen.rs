//! Listening sockets: one per address and ring thread, all on one port, and a clear answer when it is in use.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

/// Whether somebody else's listener on the port is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// First process of a server (in a fleet, the supervisor): a port in use is an error.
    First,
    /// Worker of a fleet, started or restarted: the port is the fleet's own.
    Skip,
}

/// What [`bind`] made.
#[derive(Debug)]
pub struct Listeners {
    /// For each ring thread, one listener per address, in the order of `addresses`.
    pub workers: Vec<Vec<TcpListener>>,
    /// What is listened on, with the port that was picked.
    pub addresses: Vec<SocketAddr>,
}

/// Binds `host` and `port` for that many ring threads (at least one).
///
/// `localhost` is 127.0.0.1 and, where there is IPv6, ::1. `::` takes both families. Port 0 picks one port that is
/// free on all addresses. The sockets share their port by SO_REUSEPORT, which also lets a second server of the same
/// user join unnoticed; so with [`Probe::First`] each address is first bound without it.
///
/// # Errors
/// [`ListenError`] names the address and the cause.
pub fn bind(host: &str, port: u16, workers: u16, probe: Probe) -> Result<Listeners, ListenError> {
    let mut last = None;
    for _ in 0..PORT_TRIES {
        match bind_once(&resolve(host, port)?, workers, probe) {
            // Picked on one address, taken on another: pick again.
            Err(error @ ListenError::InUse(_)) if port == 0 => last = Some(error),
            bound => return bound,
        }
    }
    Err(last.unwrap_or_else(|| ListenError::NoAddress(host.to_owned())))
}

/// Why a server cannot listen.
#[derive(Debug)]
#[non_exhaustive]
pub enum ListenError {
    /// Somebody listens there.
    InUse(SocketAddr),
    /// Another failure on that address.
    Io {
        /// Where.
        address: SocketAddr,
        /// How.
        error: io::Error,
    },
    /// The host name has no address.
    NoAddress(String),
    /// No interface has that address.
    NotLocal(SocketAddr),
    /// The port is below 1024 and this user may not.
    Privileged(SocketAddr),
}

impl ListenError {
    /// Returns what the operator can do about it, in one sentence.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::InUse(_) => "stop the other server, or choose another --port (0 picks a free one)",
            Self::Io { .. } => "check --host and --port",
            Self::NoAddress(_) => "check --host: an IP address or a name that resolves",
            Self::NotLocal(_) => "choose an address of this machine for --host, or 0.0.0.0 for all",
            Self::Privileged(_) => "choose a --port of 1024 or above, or grant CAP_NET_BIND_SERVICE",
        }
    }

    fn new(address: SocketAddr, error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EADDRINUSE) => Self::InUse(address),
            Some(libc::EADDRNOTAVAIL) => Self::NotLocal(address),
            Some(libc::EACCES) => Self::Privileged(address),
            _ => Self::Io { address, error },
        }
    }
}

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse(address) => write!(f, "cannot listen on {address}: the port is in use"),
            Self::Io { address, error } => write!(f, "cannot listen on {address}: {error}"),
            Self::NoAddress(host) => write!(f, "cannot listen on {host:?}: no such host"),
            Self::NotLocal(address) => {
                write!(f, "cannot listen on {address}: not an address of this machine")
            }
            Self::Privileged(address) => write!(f, "cannot listen on {address}: not permitted"),
        }
    }
}

impl std::error::Error for ListenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { error, .. } => Some(error),
            Self::InUse(_) | Self::NoAddress(_) | Self::NotLocal(_) | Self::Privileged(_) => None,
        }
    }
}

/// One address of a host; an optional one may be missing on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    address: SocketAddr,
    optional: bool,
}

fn resolve(host: &str, port: u16) -> Result<Vec<Candidate>, ListenError> {
    let required = |address| Candidate { address, optional: false };
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if host.eq_ignore_ascii_case("localhost") {
        let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
        let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        return Ok(vec![required(v4), Candidate { address: v6, optional: true }]);
    }
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(vec![required(SocketAddr::from((ip, port)))]);
    }
    let mut found: Vec<_> = (host, port).to_socket_addrs().into_iter().flatten().map(required).collect();
    found.dedup();
    if found.is_empty() { Err(ListenError::NoAddress(host.to_owned())) } else { Ok(found) }
}

fn bind_once(candidates: &[Candidate], workers: u16, probe: Probe) -> Result<Listeners, ListenError> {
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for candidate in candidates {
        let mut address = candidate.address;
        if let Some(first) = addresses.first() {
            address.set_port(first.port());
        }
        match find_port(address, probe) {
            Ok(bound) => addresses.push(bound),
            Err(error) if candidate.optional && is_family_missing(&error) => {}
            Err(error) => return Err(ListenError::new(address, error)),
        }
    }
    let listen =
        |address: &SocketAddr| open_listener(*address).map_err(|error| ListenError::new(*address, error));
    let worker = |_| addresses.iter().map(listen).collect::<Result<Vec<_>, _>>();
    let workers = (0..workers.max(1)).map(worker).collect::<Result<Vec<_>, _>>()?;
    Ok(Listeners { workers, addresses })
}

/// Returns the address with a port that nobody else listens on (unless told not to look). The socket is closed again.
fn find_port(address: SocketAddr, probe: Probe) -> io::Result<SocketAddr> {
    let socket = open_socket(address)?;
    if probe == Probe::Skip {
        socket.set_reuse_port(true)?;
    }
    socket.bind(&address.into())?;
    socket.local_addr()?.as_socket().ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

/// Opens a listener whose accepted sockets inherit all options: no system call per connection.
fn open_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = open_socket(address)?;
    socket.set_reuse_port(true)?;
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_user_timeout(Some(VANISHED_AFTER))?;
    let keepalive = TcpKeepalive::new()
        .with_time(VANISHED_AFTER)
        .with_interval(VANISHED_AFTER / KEEPALIVE_PROBES)
        .with_retries(KEEPALIVE_PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.bind(&address.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    Ok(socket.into())
}

fn open_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    Ok(socket)
}

fn is_family_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

/// Ports tried when port 0 is free on one address and taken on another.
const PORT_TRIES: u32 = 16;
/// Connections that the kernel holds for us; it lowers this to net.core.somaxconn.
pub(crate) const LISTEN_BACKLOG: i32 = 4096;
/// Unacknowledged data or unanswered keep-alive probes for this long: the host has vanished.
const VANISHED_AFTER: Duration = Duration::from_secs(30);
const KEEPALIVE_PROBES: u32 = 3;

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use socket2::SockRef;

    use super::*;

    #[test]
    fn localhost_is_both_families_on_one_port() {
        let bound = bind("localhost", 0, 2, Probe::First).unwrap();
        let port = bound.addresses[0].port();
        assert_ne!(port, 0);
        assert!(bound.addresses.iter().all(|address| address.port() == port && address.ip().is_loopback()));
        assert_eq!(bound.addresses[0].ip(), Ipv4Addr::LOCALHOST);
        assert_eq!(bound.workers.len(), 2);
        for listeners in &bound.workers {
            assert_eq!(listeners.len(), bound.addresses.len());
        }
    }

    #[test]
    fn a_port_in_use_is_refused_unless_it_is_the_fleets_own() {
        let first = bind("127.0.0.1", 0, 1, Probe::First).unwrap();
        let port = first.addresses[0].port();
        let error = bind("127.0.0.1", port, 1, Probe::First).unwrap_err();
        assert!(matches!(error, ListenError::InUse(address) if address.port() == port), "{error:?}");
        assert_eq!(error.to_string(), format!("cannot listen on 127.0.0.1:{port}: the port is in use"));
        bind("127.0.0.1", port, 1, Probe::Skip).unwrap();
        drop(first);
        bind("127.0.0.1", port, 1, Probe::First).unwrap();
    }

    #[test]
    fn a_stranger_without_reuse_port_is_seen() {
        let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = stranger.local_addr().unwrap().port();
        for probe in [Probe::First, Probe::Skip] {
            let error = bind("localhost", port, 1, probe).unwrap_err();
            assert!(matches!(error, ListenError::InUse(_)), "{probe:?}: {error:?}");
        }
    }

    #[test]
    fn bad_hosts_are_named() {
        let error = bind("192.0.2.1", 0, 1, Probe::First).unwrap_err();
        assert!(matches!(error, ListenError::NotLocal(_)), "{error:?}");
        let error = bind("no such host", 80, 1, Probe::First).unwrap_err();
        assert!(matches!(&error, ListenError::NoAddress(host) if host == "no such host"), "{error:?}");
    }

    #[test]
    fn accepted_sockets_inherit_the_options() {
        let bound = bind("127.0.0.1", 0, 1, Probe::First).unwrap();
        let _client = TcpStream::connect(bound.addresses[0]).unwrap();
        let (accepted, _) = bound.workers[0][0].accept().unwrap();
        let socket = SockRef::from(&accepted);
        assert!(socket.tcp_nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(VANISHED_AFTER));
        assert_eq!(socket.tcp_keepalive_time().unwrap(), VANISHED_AFTER);
    }
}
