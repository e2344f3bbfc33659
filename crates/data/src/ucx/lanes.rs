//! The lanes of an endpoint, read from UCX's own description of it.
//!
//! Pure. Newer libraries report lanes in a structure, but the headers of 1.12 do not have it, and
//! all versions can print them.
//!
//! *Invariant:* a lane is `transport/device`, UCX's names without its resource numbers.

/// The lanes in the output of `ucp_ep_print_info`, without duplicates, in its order.
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

/// The resources in the output of `ucp_context_print_info`, `transport/device` each.
///
/// A resource reads `resource 1  :  md 1  dev 1  flags -- tcp/lo`.
pub(super) fn parse_resources(description: &str) -> Vec<String> {
    let lines = description.lines().filter(|line| line.contains("resource"));
    let names = lines.filter_map(|line| line.split_whitespace().next_back());
    names.filter(|name| name.contains('/')).map(str::to_owned).collect()
}

/// The transports of resources or lanes, without duplicates, in their order.
pub fn transports(resources: &[String]) -> Vec<&str> {
    let mut transports = Vec::new();
    for resource in resources {
        let transport = resource.split('/').next().unwrap_or_default();
        if !transports.contains(&transport) {
            transports.push(transport);
        }
    }
    transports
}

/// The protocol for sending active messages of this size from device memory, and its lanes, from
/// the output of `ucp_ep_print_info`. UCX prints tables from 1.16 on, for protocols it has used.
///
/// A table begins `| … | active message by ucp_am_send* from cuda/GPU0 |`; its rows read
/// `| 5029..inf | (?) rendezvous zero-copy read from remote | cuda_ipc/cuda |`. `(?)` means that
/// the receiver may still choose otherwise.
pub fn parse_device_protocol(description: &str, bytes: u64) -> Option<(String, String)> {
    let mut of_device = false;
    let mut found = None;
    for line in description.lines() {
        let mut cells = line.split('|').skip(1).map(str::trim);
        let (Some(first), Some(second)) = (cells.next(), cells.next()) else { continue };
        let Some((low, high)) = parse_sizes(first) else {
            // Messages that are short enough for an eager send never need a mapping.
            of_device = second.contains("active message") && !second.contains("(egr)");
            of_device &= second.contains("from cuda");
            continue;
        };
        if of_device && (low..=high).contains(&bytes) {
            let name = second.trim_start_matches("(?)").trim().to_owned();
            let lanes = cells.next().unwrap_or_default().to_owned();
            let over_ipc = lanes.contains("cuda_ipc");
            // If there are several kinds of sends, the one that maps memory is for large messages.
            if over_ipc || found.is_none() {
                found = Some((name, lanes));
            }
        }
    }
    found
}

/// `8249..262143`, `256K..inf` or `0`.
fn parse_sizes(text: &str) -> Option<(u64, u64)> {
    let size = |text: &str| {
        let digits = text.trim_end_matches(['K', 'M', 'G', 'T']);
        let shift = match text.strip_prefix(digits)? {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            _ => 40,
        };
        digits.parse::<u64>().ok()?.checked_mul(1 << shift)
    };
    match text.split_once("..") {
        Some((low, "inf")) => Some((size(low)?, u64::MAX)),
        Some((low, high)) => Some((size(low)?, size(high)?)),
        None => size(text).map(|only| (only, only)),
    }
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
    fn the_protocol_of_device_memory_is_that_of_its_size() {
        let text = "\
            # +------+------+\n\
            # | ucp_context_0 intra-node cfg#1 | active message by ucp_am_send* from host memory |\n\
            # |  5029..inf | (?) rendezvous zero-copy read from remote | cma/memory  |\n\
            # | ucp_context_0 intra-node cfg#1 | active message by ucp_am_send*(egr) from cuda/GPU0 |\n\
            # |  8249..inf | multi-frag copy-in | sysv/memory |\n\
            # | ucp_context_0 intra-node cfg#1 | active message by ucp_am_send* from cuda/GPU0 |\n\
            # |          0 | short              | sysv/memory |\n\
            # |    1..256K | copy-in            | sysv/memory |\n\
            # | 262145..inf | (?) rendezvous zero-copy read from remote | cuda_ipc/cuda |\n";
        let found = |bytes| parse_device_protocol(text, bytes);
        let of = |name: &str, lanes: &str| Some((name.to_owned(), lanes.to_owned()));
        assert_eq!(found(64 << 20), of("rendezvous zero-copy read from remote", "cuda_ipc/cuda"));
        assert_eq!(found(256 << 10), of("copy-in", "sysv/memory"));
        assert_eq!(parse_device_protocol("# lane[0]:  2:posix/memory.0 md[1]\n", 8), None);
    }

    #[test]
    fn transports_are_listed_once_each() {
        let text = "#      component 0  :  self\n#      resource 0  :  md 0  dev 0  flags -- self/m\n\
                    #      resource 1  :  md 1  dev 1  flags -- tcp/lo\n\
                    #      resource 2  :  md 1  dev 2  flags -- tcp/eth0\n";
        let resources = parse_resources(text);
        assert_eq!(resources, ["self/m", "tcp/lo", "tcp/eth0"]);
        assert_eq!(transports(&resources), ["self", "tcp"]);
    }
}
