"""Names of captum's attributions, in a module without heavy imports."""

LLM = {
    "LLMAttribution": ("FeatureAblation", "ShapleyValueSampling", "ShapleyValues", "Lime", "KernelShap"),
    "LLMGradientAttribution": ("LayerIntegratedGradients", "LayerGradientXActivation", "LayerGradientShap"),
}
"""captum's attributions of language models, with the attributions that each can wrap, the default first."""
CAPTUM = (
    *("DeepLift", "FeatureAblation", "GradientShap", "InputXGradient", "IntegratedGradients", "KernelShap"),
    *("LayerIntegratedGradients", "Lime", "NoiseTunnel", "Occlusion", "Saliency"),
    *("ShapleyValueSampling", "ShapleyValues", *LLM),
)
"""captum's attributions that work for any function of the embeddings, and those of language models."""
