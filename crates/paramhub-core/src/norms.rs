//! The norm of a step's whole mean gradient, from what the routes tell of their chunks.

use thiserror::Error;

/// The parts of the norms under way at one worker. Two steps at most are: a route is released for the next one only when
/// every route has told its part of this one, and it tells a worker before it answers it.
#[derive(Clone, Debug)]
pub struct Norms {
    /// Of step `s` at `s % 2`.
    books: [Book; 2],
    /// The step of which each route's next part is.
    next: Vec<u32>,
    /// The oldest step that is not complete; none before the first part.
    oldest: Option<u32>,
}

#[derive(Clone, Debug)]
struct Book {
    /// The sums of squares, by route.
    parts: Vec<f64>,
    missing: usize,
}

/// A step whose parts are all here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientNorm {
    /// The step.
    pub step: u32,
    /// The Euclidean norm of its whole mean gradient.
    pub norm: f64,
}

/// A part that nobody waits for: the hub is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the hub told its part of the norm of step {0}, for which nothing waits")]
pub struct UnaskedNorm(pub u32);

impl Norms {
    /// Books for so many routes.
    pub fn new(routes: usize) -> Self {
        let book = || Book { parts: vec![0.0; routes], missing: routes };
        Norms { books: [book(), book()], next: vec![0; routes], oldest: None }
    }

    /// Takes what the route at this position tells of a step; the norm once the last part is here. Parts are added in route
    /// order, whatever the order in which they come.
    pub fn part(
        &mut self,
        route: usize,
        step: u32,
        squares: f64,
    ) -> Result<Option<GradientNorm>, UnaskedNorm> {
        let oldest = *self.oldest.get_or_insert_with(|| {
            self.next.fill(step);
            step
        });
        if step != self.next[route] || step - oldest > 1 || step == u32::MAX {
            return Err(UnaskedNorm(step));
        }
        self.next[route] = step + 1;
        let book = &mut self.books[step as usize % 2];
        book.parts[route] = squares;
        book.missing -= 1;
        if book.missing > 0 {
            return Ok(None);
        }
        book.missing = book.parts.len();
        let norm = book.parts.iter().sum::<f64>().sqrt();
        self.oldest = Some(oldest + 1);
        Ok(Some(GradientNorm { step, norm }))
    }
}

/// What clips a gradient of this `norm` to `clip_norm`, as torch.nn.utils.clip_grad_norm_ defines it:
/// `min(1, clip_norm / (norm + 1e-6))`. An infinite norm makes it 0 and NaN makes it NaN, as there where errors are not asked
/// for.
pub fn clip_factor(clip_norm: f64, norm: f64) -> f32 {
    let factor = (clip_norm / (norm + 1e-6)) as f32;
    // Not `min`, which would make 1 of NaN.
    if factor > 1.0 { 1.0 } else { factor }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_added_in_route_order_whenever_they_come() {
        let parts = [1e16_f64, 1.0, 1.0];
        let norm = (parts[0] + parts[1] + parts[2]).sqrt();
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut norms = Norms::new(3);
            for step in 7..11 {
                for route in order {
                    let told = norms.part(route, step, parts[route]).unwrap();
                    assert_eq!(told.is_some(), route == order[2]);
                    assert!(told.is_none_or(|told| told == GradientNorm { step, norm }));
                }
            }
        }
    }

    #[test]
    fn a_route_may_be_one_step_ahead_and_no_more() {
        let mut norms = Norms::new(2);
        assert_eq!(norms.part(0, 3, 9.0), Ok(None));
        assert_eq!(norms.part(0, 3, 9.0), Err(UnaskedNorm(3)), "twice");
        assert_eq!(norms.part(1, 4, 9.0), Err(UnaskedNorm(4)), "one was left out");
        assert_eq!(norms.part(0, 4, 1.0), Ok(None));
        assert_eq!(norms.part(0, 5, 1.0), Err(UnaskedNorm(5)), "two steps ahead");
        assert_eq!(norms.part(1, 3, 16.0), Ok(Some(GradientNorm { step: 3, norm: 5.0 })));
        assert_eq!(norms.part(0, 5, 4.0), Ok(None));
        assert_eq!(norms.part(1, 4, 0.0), Ok(Some(GradientNorm { step: 4, norm: 1.0 })));
        assert_eq!(norms.part(1, 5, f64::INFINITY).unwrap().unwrap().norm, f64::INFINITY);
    }

    #[test]
    fn a_gradient_is_clipped_as_torch_does() {
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert_eq!(clip_factor(1.0, 0.0), 1.0);
        assert_eq!(clip_factor(1.0, 4.0), (1.0 / 4.000_001) as f32);
        assert_eq!(clip_factor(2.0, 2.0), (2.0 / 2.000_001) as f32, "just below 1");
        assert_eq!(clip_factor(1.0, f64::INFINITY), 0.0);
        assert!(clip_factor(1.0, f64::NAN).is_nan());
    }
}
