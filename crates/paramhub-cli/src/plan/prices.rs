//! The option `--prices`.

use std::str::FromStr;

use paramhub::cost::Prices;

/// Prices as they are given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GivenPrices(pub(super) Prices);

const NAMES: [&str; 7] =
    ["worker", "worker-port", "hub", "hub-port", "switch-port", "cable", "oversubscription"];

impl FromStr for GivenPrices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut given = [None; NAMES.len()];
        for part in text.split(',') {
            let form = || format!("`{part}`: write NAME=PRICE, where NAME is one of {}", NAMES.join(", "));
            let (name, price) = part.split_once('=').ok_or_else(form)?;
            let place = NAMES.iter().position(|known| *known == name.trim()).ok_or_else(form)?;
            let price = price.trim().parse().ok().filter(|price: &f64| price.is_finite() && *price >= 0.0);
            let price = price.ok_or_else(|| format!("`{part}`: a price is a number, 0 or above"))?;
            if given[place].replace(price).is_some() {
                return Err(format!("{} is given twice", NAMES[place]));
            }
        }
        let [worker, worker_port, hub, hub_port, switch_port, cable, oversubscription] = given;
        let needed = |price: Option<f64>, name| {
            price.ok_or_else(|| format!("the price of {name} is missing, as in {name}=100"))
        };
        let worker_port = needed(worker_port, "worker-port")?;
        let prices = Prices {
            worker: needed(worker, "worker")?,
            worker_port,
            hub: needed(hub, "hub")?,
            hub_port: hub_port.unwrap_or(worker_port),
            switch_port: needed(switch_port, "switch-port")?,
            cable: needed(cable, "cable")?,
            oversubscription: oversubscription.unwrap_or(1.0),
        };
        if prices.oversubscription < 1.0 {
            return Err(
                "oversubscription is 1 or above: 1 for racks whose links to the core carry everything".into(),
            );
        }
        if prices.worker <= 0.0 {
            return Err("a worker costs something".into());
        }
        Ok(GivenPrices(prices))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_named_in_any_order() {
        let text = "cable=31.25, worker=6913,worker-port=260,hub=8407,switch-port=165,oversubscription=2";
        let GivenPrices(prices) = text.parse().unwrap();
        assert_eq!((prices.worker, prices.hub_port, prices.oversubscription), (6913.0, 260.0, 2.0));
        for (wrong, reason) in [
            ("worker=1", "worker-port is missing"),
            ("rack=1", "NAME is one of worker, worker-port"),
            ("worker=cheap", "a price is a number"),
            ("worker=-1", "a price is a number"),
            ("worker=NaN", "a price is a number"),
            ("worker=1,worker=2", "given twice"),
            ("worker=0,worker-port=1,hub=1,switch-port=1,cable=1", "costs something"),
            ("worker=1,worker-port=1,hub=1,switch-port=1,cable=1,oversubscription=0.5", "1 or above"),
        ] {
            let refused = wrong.parse::<GivenPrices>().unwrap_err();
            assert!(refused.contains(reason), "{wrong}: {refused}");
        }
    }
}
