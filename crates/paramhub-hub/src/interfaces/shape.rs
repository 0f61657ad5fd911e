//! The shape of the hub for the placement, and its description for people.

use paramhub_core::placement::{HubShape, InterfaceShape};
use paramhub_transport::interface::Sysfs;

use super::Listening;
use super::assign::{Assignment, Demand, assign, processors};
use crate::config::{HubConfig, HubError};

/// Ties the interfaces to cores, and the cores to processors of the same node.
pub(crate) fn plan(listening: &[Listening], cores: usize, sysfs: &Sysfs) -> Result<Assignment, HubError> {
    let processors = processors(sysfs)
        .map_err(|cause| HubError::System { what: "learn which processors it may use", cause })?;
    let demand = |listening: &Listening| Demand { weight: listening.weight, node: listening.node };
    let demands: Vec<Demand> = listening.iter().map(demand).collect();
    Ok(assign(&demands, cores, &processors))
}

/// The hub's shape. It lists each interface once per stream, side by side: the placement then spreads the
/// chunks over the copies as over interfaces.
pub(crate) fn shape(
    config: &HubConfig,
    listening: &[Listening],
    assignment: &Assignment,
) -> Result<HubShape, HubError> {
    let address_of = |interface: usize| match (config.advertise.get(interface), listening[interface].address)
    {
        (Some(advertised), _) => Ok(advertised.clone()),
        (None, address) if address.ip().is_unspecified() => Err(HubError::Config(format!(
            "{address} is no address that workers can dial: listen on the address of an interface, or say what to dial with \
             --advertise"
        ))),
        (None, address) => Ok(address.to_string()),
    };
    let interface = |interface: usize| {
        // Copies share the rate of the interface, so hubs with different numbers of streams have comparable
        // weights.
        let weight = (listening[interface].weight / config.streams as u32).max(1);
        let cores = assignment.cores_of[interface].clone();
        Ok(InterfaceShape { address: address_of(interface)?, cores, weight })
    };
    let copies = (0..listening.len()).flat_map(|number| std::iter::repeat_n(number, config.streams));
    Ok(HubShape { interfaces: copies.map(interface).collect::<Result<_, HubError>>()?, local: None })
}

/// One line for each interface: name, address, rate, node, cores, processors.
pub(crate) fn describe(listening: &[Listening], assignment: &Assignment, is_pinned: bool) -> Vec<String> {
    let line = |(listening, cores): (&Listening, &Vec<u16>)| {
        let rate = match listening.rate {
            Some(rate) => rate.to_string(),
            None => "unknown rate".into(),
        };
        let node = listening.node.map_or("no known node".into(), |node| format!("node {node}"));
        let processors: Vec<String> = cores
            .iter()
            .map(|&core| {
                let processor = assignment.processor_of[usize::from(core)];
                match (listening.node, processor.node) {
                    (Some(mine), Some(other)) if mine != other => {
                        format!("{} of node {other}", processor.number)
                    }
                    _ => processor.number.to_string(),
                }
            })
            .collect();
        let cores: Vec<String> = cores.iter().map(ToString::to_string).collect();
        let pinned = match is_pinned {
            true => format!("on processors {}", processors.join(", ")),
            false => "on any processor".into(),
        };
        format!(
            "interface {}: {rate}, weight {}, {node}, cores {} {pinned}",
            listening.called(),
            listening.weight,
            cores.join(", ")
        )
    };
    listening.iter().zip(&assignment.cores_of).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::super::assign::Processor;
    use super::*;

    fn listening(address: &str, name: &str, node: Option<u32>) -> Listening {
        let address = address.parse().unwrap();
        Listening { address, name: Some(name.into()), rate: "25gbit".parse().ok(), weight: 25_000, node }
    }

    #[test]
    fn people_read_what_was_tied_together() {
        let all = [listening("10.0.0.7:1", "eth0", Some(0)), listening("10.0.1.7:1", "eth1", None)];
        let assignment = Assignment {
            cores_of: vec![vec![0, 2], vec![1]],
            processor_of: [(4, 0), (5, 0), (8, 1)]
                .map(|(number, node)| Processor { number, node: Some(node) })
                .to_vec(),
        };
        assert_eq!(
            describe(&all, &assignment, true),
            [
                "interface eth0 (10.0.0.7:1): 25gbit, weight 25000, node 0, cores 0, 2 on processors 4, 8 of node 1",
                "interface eth1 (10.0.1.7:1): 25gbit, weight 25000, no known node, cores 1 on processors 5"
            ]
        );
        assert!(describe(&all, &assignment, false)[1].ends_with("cores 1 on any processor"));
        let config = HubConfig { streams: 2, ..HubConfig::default() };
        let shape = shape(&config, &all, &assignment).unwrap();
        let seen: Vec<(&str, u32, usize)> =
            shape.interfaces.iter().map(|i| (i.address.as_str(), i.weight, i.cores.len())).collect();
        assert_eq!(
            seen,
            [
                ("10.0.0.7:1", 12_500, 2),
                ("10.0.0.7:1", 12_500, 2),
                ("10.0.1.7:1", 12_500, 1),
                ("10.0.1.7:1", 12_500, 1)
            ]
        );
    }
}
