//! A small layer-wise trainer on candle that exchanges its gradients through a hub.
