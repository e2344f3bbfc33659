//! The lanes of an endpoint, read from UCX's own description of it.
//!
//! Pure. Newer libraries can be asked for lanes through a structure, but the headers of 1.12 do not
//! know it, and all versions print them.
//!
//! *Invariant:* a lane is `transport/device`, UCX's words without its resource numbers.

/// The lanes in a description that `ucp_ep_print_info` wrote, without repetition, in its order.
///
/// A lane reads `lane[0]:  2:posix/memory.0 md[1]  -> md[1]/posix/sysdev[255] am am_bw#0`.
pub fn parse(description: &str) -> Vec<String> {
    let mut lanes: Vec<String> = Vec::new();
    for line in description.lines() {
        let Some(lane) = parse_line(line) else { continue };
        if !lanes.contains(&lane) {
            lanes.push(lane);
        }
    }
    lanes
}

/// The transports in a description that `ucp_context_print_info` wrote, likewise.
///
/// A resource reads `resource 1  :  md 1  dev 1  flags -- tcp/lo`.
pub(super) fn parse_transports(description: &str) -> Vec<String> {
    let mut transports: Vec<String> = Vec::new();
    for line in description.lines().filter(|line| line.contains("resource")) {
        let name = line.split_whitespace().next_back().and_then(|name| name.split_once('/'));
        let Some((transport, _)) = name else { continue };
        if !transports.iter().any(|known| known == transport) {
            transports.push(transport.to_owned());
        }
    }
    transports
}

fn parse_line(line: &str) -> Option<String> {
    let (_, rest) = line.split_once("lane[")?;
    let (_, rest) = rest.split_once("]:")?;
    let resource = rest.split_whitespace().next()?;
    let (_, name) = resource.split_once(':')?;
    let name = match name.rsplit_once('.') {
        Some((name, index)) if index.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => name,
    };
    name.contains('/').then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_are_listed_once_each() {
        let text = "#      component 0  :  self\n#      resource 0  :  md 0  dev 0  flags -- self/m\n\
                    #      resource 1  :  md 1  dev 1  flags -- tcp/lo\n\
                    #      resource 2  :  md 1  dev 2  flags -- tcp/eth0\n";
        assert_eq!(parse_transports(text), ["self", "tcp"]);
    }
}
