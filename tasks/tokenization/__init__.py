"""Exactly which tokens are supervised?"""
